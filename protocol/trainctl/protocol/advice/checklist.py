"""Settings of a run that are often left slow: each is fine, or has the command that changes it. Pure."""

from collections.abc import Iterator
from typing import Final, Literal

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts
from trainctl.protocol.advice.environment import platform_of
from trainctl.protocol.advice.memory_fit import fit_of
from trainctl.protocol.advice.node_speed import MOST_OF_CAP, micro_of
from trainctl.protocol.batch.data_statistics import DataStatistics
from trainctl.protocol.calibration.peak import peak
from trainctl.protocol.config.families import ENCODER_DECODERS, TESTED
from trainctl.protocol.config.presets import preset_of_device
from trainctl.protocol.config.run_tables import ComputeDtype, RunFile

FASTER_PRODUCTS: Final = 1.3
"""Ratio of matrix products from which a narrower data type is advised."""
MUCH_PADDING: Final = 0.1
"""Part of a micro-batch's positions that are padding from which packing is advised."""
MANY_TRUNCATED: Final = 0.01
"""Part of samples that lose their end from which longer sequences are advised."""
FREE_PART: Final = 0.5
"""Part of the memory cap below which layers needn't be computed again."""
LEAST_GAIN: Final = 0.02

State = Literal["ok", "change", "unknown"]


class Check(msgspec.Struct, frozen=True):
    """One point of the list."""

    name: str
    state: State
    text: str
    command: str = ""  # what changes it; empty if it is fine or isn't known


def checklist(
    config: RunFile, facts: AdviceFacts, family: str, statistics: DataStatistics | None, caches: str
) -> tuple[Check, ...]:
    """Of a run. `statistics`: of its data, None if they aren't on this machine; `caches`: where tokens are kept."""
    return (
        _precision(config, facts), _compile(config, facts), _attention(family), _checkpointing(config, facts),
        _packing(config, facts, statistics), _tokens(caches), _lengths(config, facts, statistics),
        *_micro_batches(facts),
    )  # fmt: skip


def _set(facts: AdviceFacts, setting: str) -> str:
    return f"trainctl run {facts.run.file} --set {setting}"


def _precision(config: RunFile, facts: AdviceFacts) -> Check:
    dtype, (narrow, why) = config.model.dtype, _narrowest(facts)
    if dtype == "auto":
        return Check("precision", "ok", "auto: the best type that the devices of all ranks have")
    if config.model.computed == narrow:
        return Check("precision", "ok", dtype)
    change = _set(facts, f"model.dtype={narrow}")
    if why:
        return Check("precision", "change", f"{dtype}; {why}", change)
    ratios = _products(facts, config.model.computed, narrow)
    if not ratios:
        return Check("precision", "unknown", f"{dtype}; no node's products in {narrow} are measured")
    slowest = min(ratios, key=lambda name: ratios[name])
    text = f"products in {narrow} are {ratios[slowest]:.2g} x as fast as in {dtype} on {slowest}"
    if ratios[slowest] < FASTER_PRODUCTS:
        return Check("precision", "ok", f"{dtype}: {text}")
    return Check("precision", "change", text, change)


def _narrowest(facts: AdviceFacts) -> tuple[ComputeDtype, str]:
    """The data type in which all nodes compute fast, by their presets; and the node that decides it, if one does."""
    found = {node.name: preset for node in facts.nodes if (preset := preset_of_device(node.device)) is not None}
    for dtype in ("float32", "float16", "bfloat16"):
        name = next((name for name, preset in found.items() if preset.dtype == dtype), None)
        if name is not None:
            return found[name].dtype, f"the preset of {found[name].name}, as on {name}, is {dtype}"
    return "bfloat16", ""


def _products(facts: AdviceFacts, dtype: str, narrow: str) -> dict[str, float]:
    """By node, how many times faster its matrix products are in the narrow type."""
    ratios = {}
    for node in facts.nodes:
        profile = node.profile or node.other_profile
        rates = {one.dtype: one.gflops for one in profile.matmul} if profile is not None else {}
        if dtype in rates and narrow in rates:
            ratios[node.name] = rates[narrow] / rates[dtype]
    return ratios


def _compile(config: RunFile, facts: AdviceFacts) -> Check:
    mode = config.model.compile
    if mode != "off":
        return Check("compile", "ok", f"{mode}: decoder layers on torch")
    if config.model.base == "nf4":
        return Check("compile", "ok", "off: nf4 can't be compiled")
    if config.model.attention == "varlen":
        return Check("compile", "ok", "off: varlen attention can't be combined with it")
    if any(platform_of("", node.device) == "NVIDIA GPU" for node in facts.nodes):
        text = "off; on NVIDIA devices, compiled layers are faster after the first steps, in which they are compiled"
        return Check("compile", "change", text, _set(facts, "model.compile=default"))
    return Check("compile", "ok", "off: it mainly helps NVIDIA devices")


def _attention(family: str) -> Check:
    if family in TESTED:
        return Check("fused attention", "ok", "torch's and MLX's own scaled_dot_product_attention")
    known = "an encoder-decoder model" if family in ENCODER_DECODERS else f"family {family or 'unknown'}"
    return Check("fused attention", "unknown", f"{known}: the library decides")


def _checkpointing(config: RunFile, facts: AdviceFacts) -> Check:
    mode = config.model.gradient_checkpointing
    fits = {node.name: _used_part(node, facts) for node in facts.nodes}
    known = {name: part for name, part in fits.items() if part is not None}
    if not known:
        return Check("checkpointing", "unknown", f"{mode}; the nodes' memory isn't known")
    worst = max(known, key=lambda name: known[name])
    text = f"{mode}; {worst} needs {known[worst]:.0%} of its memory"
    if mode != "all" and known[worst] > 1:
        return Check("checkpointing", "change", text, _set(facts, "model.gradient_checkpointing=all"))
    if mode != "none" and known[worst] < FREE_PART:
        return Check("checkpointing", "change", text, _set(facts, "model.gradient_checkpointing=none"))
    return Check("checkpointing", "ok", text)


def _used_part(node: NodeFacts, facts: AdviceFacts) -> float | None:
    micro = micro_of(node, node.profile, facts.run.global_batch) if node.profile is not None else 1
    fit = fit_of(node, facts.run, micro, in_group=len(facts.nodes) > 1)
    return fit.needed_bytes / fit.cap_bytes if fit.needed_bytes is not None and fit.cap_bytes else None


def _packing(config: RunFile, facts: AdviceFacts, found: DataStatistics | None) -> Check:
    if config.data.kind == "text":
        return Check("packing", "ok", "text fills its blocks")
    if found is None:
        return Check("packing", "unknown", "the data aren't on this machine")
    if config.data.packing != "none":
        return Check("packing", "ok", config.data.packing)
    text = f"{found.padding:.0%} of a micro-batch is padding"
    if found.padding < MUCH_PADDING or found.packs is None:
        return Check("packing", "ok", text)
    text += f"; {found.samples:,} {found.unit} would make {found.packs:,} packs"
    return Check("packing", "change", text, _set(facts, "data.packing=best-fit"))


def _tokens(caches: str) -> Check:
    return Check("cached tokens", "ok", f"tokenized once, before step 1, and kept in {caches}")


def _lengths(config: RunFile, facts: AdviceFacts, found: DataStatistics | None) -> Check:
    if config.data.kind == "text":
        return Check("lengths", "ok", f"all {config.data.sequence_length:,} tokens")
    if found is None:
        return Check("lengths", "unknown", "the data aren't on this machine")
    shown = ", ".join(f"{name} {value:,}" for name, value in found.lengths.items())
    longest, cut = found.lengths.get("p100", 0), found.truncated / max(found.samples, 1)
    if cut > MANY_TRUNCATED:
        setting = f"data.sequence_length={longest}"
        return Check("lengths", "change", f"{shown}; {cut:.1%} lose their end", _set(facts, setting))
    return Check("lengths", "ok", f"{shown} of {found.sequence_length:,} tokens")


def _micro_batches(facts: AdviceFacts) -> Iterator[Check]:
    for node in facts.nodes:
        if node.profile is None:
            command = f"trainctl calibrate {facts.run.file} --node {node.name}"
            yield Check("micro-batch", "unknown", f"{node.name} isn't calibrated for this run", command)
            continue
        now = micro_of(node, node.profile, facts.run.global_batch)
        cap = node.cap_bytes if node.cap_bytes is not None else node.profile.memory_cap_bytes
        best = peak(node.profile.passes, facts.run.global_batch, None if cap is None else MOST_OF_CAP * cap)
        rate = next((one.rate for one in node.profile.passes if one.micro == now), None)
        if rate is None or best.micro == now or best.rate < (1 + LEAST_GAIN) * rate:
            known = (
                f"wasn't measured; {best.micro} is fastest" if rate is None else f"{rate / best.rate:.0%} of the peak"
            )
            text = f"{now} on {node.name}: {known}"
            yield Check("micro-batch", "ok" if rate is not None else "unknown", text)
        else:
            text = f"{now} on {node.name}: {best.micro} is {best.rate / rate - 1:+.0%}"
            yield Check("micro-batch", "change", text, _set(facts, f"nodes.{node.name}.micro={best.micro}"))
