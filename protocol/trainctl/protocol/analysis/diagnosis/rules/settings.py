"""Settings that leave speed unused: precision, attention, gradient checkpointing, packing, cached tokens."""

from collections.abc import Iterator
from statistics import median
from typing import Final

from trainctl.protocol.analysis.diagnosis.rule import Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.machine import DATA_PART
from trainctl.protocol.analysis.diagnosis.situation import Situation
from trainctl.protocol.analysis.diagnosis.words import megabytes, percent, seconds
from trainctl.protocol.batch.device_types import types_of_device

FASTER = 1.3
"""Ratio of a device's bfloat16 and float32 matrix products from which bfloat16 is faster."""
FREE_MEMORY = 0.6
"""Part of the memory cap below which a peak leaves room for all activations."""
RECOMPUTED: Final = {"alternate": 0.5, "all": 1.0}
"""Part of a forward pass that gradient checkpointing computes again in the backward pass."""
SHORT = 0.5
"""Part of the sequence length below which the mean sample is short."""
DISK_READ = 1e6
"""Bytes per second read from the disk from which tokens aren't in memory."""


def float32(s: Situation) -> Iterator[Verdict]:
    """float32 on a device that computes faster in bfloat16."""
    views = s.facts.view.ranks if s.facts.view is not None else ()
    known = [view for view in views if view.compute is not None]
    without = next((view for view in views if types_of_device(view.device or "") == ()), None)
    if not known:
        yield Unknown("the ranks' precision")
    for view in known:
        assert view.compute is not None
        profile = s.facts.profiles.get(view.rank)
        rates = profile.gflops if profile is not None else {}
        ratio = rates["bfloat16"] / rates["float32"] if {"bfloat16", "float32"} <= rates.keys() else None
        has_it = ratio >= FASTER if ratio is not None else "bfloat16" in (types_of_device(view.device or "") or ())
        if view.compute.dtype != "float32":
            yield Clear(f"{s.label(view.rank)} computes in {view.compute.dtype}", view.node)
        elif without is not None:
            its = f"{without.device} of {without.node} has no 16-bit type"
            yield Clear(f"{s.label(view.rank)} computes as all ranks do, and {its}", view.node)
        elif not has_it:
            yield Clear(f"bfloat16 is not known to be faster on {view.node}", view.node)
        else:
            said = [f"{s.label(view.rank)} computes in float32 on {view.device}"]
            said += [f"its matrix products are {ratio:.1f} times as fast in bfloat16"] if ratio else []
            yield Found(f"{view.node} computes in float32", tuple(said), view.node, view.rank, severity="info",
                        values={"node": view.node})  # fmt: skip


def attention(s: Situation) -> Iterator[Verdict]:
    """Attention that computes all probabilities."""
    views = s.facts.view.ranks if s.facts.view is not None else ()
    known = [view for view in views if view.compute is not None and view.compute.attention]
    if not known:
        yield Unknown("the ranks' attention kernels")
    for view in known:
        assert view.compute is not None
        if view.compute.attention != "eager":
            yield Clear(f"{s.label(view.rank)}'s attention is {view.compute.attention}", view.node)
        else:
            said = f"{s.label(view.rank)}'s attention is eager: it stores a probability for each pair of tokens"
            yield Found(f"{view.node}'s attention is not fused", (said,), view.node, view.rank, severity="info",
                        values={"node": view.node})  # fmt: skip


def checkpointing(s: Situation) -> Iterator[Verdict]:
    """Gradient checkpointing while memory is free."""
    config = s.facts.config
    if config is None or not s.ranks:
        yield Unknown("the run file" if config is None else "enough steps of the present plan")
        return
    for rank, its in s.ranks.items():
        own = config.nodes[its.node].gradient_checkpointing if its.node in config.nodes else None
        mode = own or config.model.gradient_checkpointing
        peak, cap = s.memory(rank)
        if mode == "none":
            yield Clear(f"{s.label(rank)} has no gradient checkpointing", its.node)
        elif not peak or not cap:
            yield Unknown(f"{s.label(rank)}'s peak memory and its cap", its.node)
        elif peak > FREE_MEMORY * cap:
            yield Clear(f"{s.label(rank)} needs {percent(peak / cap)} of its memory", its.node)
        else:
            again = RECOMPUTED[mode] * its.phases["forward"]
            said = f"{s.label(rank)}: peak {megabytes(peak)} of {megabytes(cap)} with gradient checkpointing {mode}"
            what_if = s.without({rank: again}, f"{s.label(rank)}'s second forward pass")
            yield Found(f"{its.node} computes activations twice", (said,), its.node, rank, what_if, "info",
                        {"node": its.node})  # fmt: skip


def packing(s: Situation) -> Iterator[Verdict]:
    """Short samples that aren't packed."""
    config = s.facts.config
    lengths = [part.tokens / part.samples for part in s.facts.parts if part.samples and part.tokens]
    if config is None or not lengths:
        yield Unknown("the run file" if config is None else "tokens of the steps")
        return
    mean, length = median(lengths), config.data.sequence_length
    if config.data.kind == "text" or config.data.packing != "none" or config.data.growing:
        yield Clear("samples are full, packed, or can't be packed")
    elif mean >= SHORT * length:
        yield Clear(f"a mean sample has {mean:,.0f} of {length:,} tokens")
    else:
        said = f"a mean sample has {mean:,.0f} tokens, {percent(mean / length)} of data.sequence_length = {length:,}"
        yield Found("short samples are not packed", (said,), severity="info")


def tokens_cached(s: Situation) -> Iterator[Verdict]:
    """Tokens that are read from the disk in each step, and waited for."""
    for node in dict.fromkeys(its.node for its in s.ranks.values()):
        read = s.reading(node, "disk_read_bytes_per_second")
        late = max(s.ranks[rank].data_mean for rank in s.ranks_of(node))
        if read is None or not s.step_seconds:
            yield Unknown(f"bytes read from {node}'s disk", node)
        elif read < DISK_READ or late < DATA_PART * s.step_seconds:
            yield Clear(f"{megabytes(read)}/s read from {node}'s disk", node)
        else:
            said = f"{megabytes(read)}/s read from the disk, {seconds(late)} of a step waiting for data"
            yield Found(f"{node}'s tokens are not in memory", (said,), node, severity="info", values={"node": node})
    if not s.ranks:
        yield Unknown("enough steps of the present plan")
