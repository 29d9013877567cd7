"""Settings that leave speed unused (precision, attention, gradient checkpointing, packing, cached tokens), and devices
whose clock or processors are held back."""

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Final

from trainctl.protocol.analysis.diagnosis.rule import NO_STEPS, Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.machine import each_node, impact, is_slower, without_slowdown
from trainctl.protocol.analysis.diagnosis.situation import Situation, loaded_clock, megabytes, percent
from trainctl.protocol.batch.device_table import types_of_device
from trainctl.protocol.batch.settings_rules import ATTENTION, PACKING, PRECISION, RECOMPUTED, RankSettings
from trainctl.protocol.messages import CLOCK_LIMITED_BY, GpuReading, WhatIf
from trainctl.protocol.messages.event_prose import seconds

PASSES_AGAIN: Final = {"alternate": 0.5, "all": 1.0}
"""Part of a forward pass that gradient checkpointing computes again in the backward pass."""
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
        types = types_of_device(view.device or "") or ()
        if view.compute.dtype != "float32":
            yield Clear(f"{s.label(view.rank)} computes in {view.compute.dtype}", view.node)
        elif without is not None:
            its = f"{without.device} of {without.node} has no 16-bit type"
            yield Clear(f"{s.label(view.rank)} computes as all ranks do, and {its}", view.node)
        elif not PRECISION.by_rank(RankSettings(has_narrower="bfloat16" in types, products=ratio)):
            yield Clear(f"bfloat16 is not known to be faster on {view.node}", view.node)
        else:
            said = [f"{s.label(view.rank)} computes in float32 on {view.device}"]
            said += [f"its matrix products are {ratio:.1f} times as fast in bfloat16"] if ratio else []
            yield Found(
                f"{view.node} computes in float32", tuple(said), view.node, view.rank, None, "info", {"node": view.node}
            )


def attention(s: Situation) -> Iterator[Verdict]:
    """Attention that computes all probabilities."""
    views = s.facts.view.ranks if s.facts.view is not None else ()
    known = [view for view in views if view.compute is not None and view.compute.attention]
    if not known:
        yield Unknown("the ranks' attention kernels")
    for view in known:
        assert view.compute is not None
        if not ATTENTION.by_rank(RankSettings(attention=view.compute.attention)):
            yield Clear(f"{s.label(view.rank)}'s attention is {view.compute.attention}", view.node)
        else:
            said = f"{s.label(view.rank)}'s attention is eager: it stores a probability for each pair of tokens"
            title = f"{view.node}'s attention is not fused"
            yield Found(title, (said,), view.node, view.rank, None, "info", {"node": view.node})


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
        elif not RECOMPUTED.by_rank(RankSettings(checkpointing=mode, memory_part=peak / cap)):
            yield Clear(f"{s.label(rank)} needs {percent(peak / cap)} of its memory", its.node)
        else:
            again = PASSES_AGAIN[mode] * its.phases["forward"]
            said = f"{s.label(rank)}: peak {megabytes(peak)} of {megabytes(cap)} with gradient checkpointing {mode}"
            what_if = s.without({rank: again}, f"{s.label(rank)}'s second forward pass")
            yield Found(
                f"{its.node} computes activations twice", (said,), its.node, rank, what_if, "info", {"node": its.node}
            )


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
    elif not PACKING.by_rank(RankSettings(sample=mean / length)):
        yield Clear(f"a mean sample has {mean:,.0f} of {length:,} tokens")
    else:
        said = f"a mean sample has {mean:,.0f} tokens, {percent(mean / length)} of data.sequence_length = {length:,}"
        yield Found("short samples are not packed", (said,), severity="info")


def tokens_cached(s: Situation) -> Iterator[Verdict]:
    """Tokens that are read from the disk in each step, and waited for."""
    for node in dict.fromkeys(its.node for its in s.ranks.values()):
        read = s.reading(node, "disk_read_bytes_per_second")
        late = max([s.data_waits.get(rank, 0.0) for rank in s.ranks_of(node)])
        if read is None or not s.step_seconds:
            yield Unknown(f"bytes read from {node}'s disk", node)
        elif read < DISK_READ or not late:
            yield Clear(f"{megabytes(read)}/s read from {node}'s disk", node)
        else:
            said = f"{megabytes(read)}/s read from the disk, {seconds(late)} of a step waiting for data"
            yield Found(f"{node}'s tokens are not in memory", (said,), node, severity="info", values={"node": node})
    if not s.ranks:
        yield NO_STEPS


HEAVY_HEAT = 2
"""Level of macOS's thermal pressure that holds a chip back much."""
QUOTA_PERCENT, ALWAYS_PERCENT = 5.0, 50.0
"""Percent of quota periods in which processes were stopped: with slower passes, and by itself."""


@each_node
def throttled(s: Situation, node: str) -> Iterator[Verdict]:
    """A device that heat, a power cap, its hardware or a quota holds back."""
    signs = [*_limits(s, node), *_quota(s, node), *_heat(s, node)]
    known = any(s.gpus(rank) for rank in s.ranks_of(node)) or any(
        s.reading(node, name) is not None for name in ("cpu_throttled_percent", "thermal_pressure")
    )
    if signs:
        why = signs[0][0]
        what_if = without_slowdown(s, node, f"{why} on {node}") or _by_clock(s, node, why)
        more = (impact(s, node),) if impact(s, node) else ()
        values = {"node": node}
        yield Found(
            f"{node} is held back by {why}", (*(line for _, line in signs), *more), node, what_if=what_if, values=values
        )
    elif known:
        yield Clear("no heat, power or quota limit holds the device back", node)
    else:
        yield Unknown(f"clock limits, thermal pressure and quota of {node}", node)


def _limits(s: Situation, node: str) -> Iterator[tuple[str, str]]:
    for rank in s.ranks_of(node):
        gpus = s.gpus(rank)
        limits = Counter(limit for gpu in gpus for limit in gpu.clock_limits)
        for limit, count in limits.most_common():
            # Healthy devices often reach their power cap.
            if count > len(gpus) / 2 and (limit != "power" or is_slower(s, node)):
                said = f"{gpus[-1].name}: its clock was lowered in {count} of {len(gpus)} readings{_state(gpus[-1])}"
                yield CLOCK_LIMITED_BY[limit], said
                return
        now, before = loaded_clock(gpus), s.clock_before(rank)
        if now and before and now < (1 - s.alerts.clock_drop_percent / 100) * before:
            yield "a lower clock", f"{gpus[-1].name}: {now:,.0f} MHz under load, {before:,.0f} MHz before"
            return


def _state(gpu: GpuReading) -> str:
    known = {"{:.0f} °C": gpu.temperature_celsius, "{:,.0f} MHz": gpu.clock_mhz, "{:.0f} W": gpu.power_watts}
    parts = [words.format(value) for words, value in known.items() if value is not None]
    return f", {', '.join(parts)}" if parts else ""


def _by_clock(s: Situation, node: str, why: str) -> WhatIf | None:
    removed = {}
    for rank in s.ranks_of(node):
        now, before = loaded_clock(s.gpus(rank)), s.clock_before(rank)
        if now and before and now < before:
            removed[rank] = s.ranks[rank].busy * (1 - now / before)
    return s.without(removed, f"{why} on {node}") if removed else None


def _quota(s: Situation, node: str) -> Iterator[tuple[str, str]]:
    stopped = s.reading(node, "cpu_throttled_percent")
    if stopped is not None and (stopped >= ALWAYS_PERCENT or (stopped >= QUOTA_PERCENT and is_slower(s, node))):
        yield "its CPU quota", f"processes stopped in {stopped:.0f} % of the quota's periods"


def _heat(s: Situation, node: str) -> Iterator[tuple[str, str]]:
    level = s.reading(node, "thermal_pressure")
    if level is not None and level >= HEAVY_HEAT:
        yield "heat", f"thermal pressure {level:.0f} of 4"
