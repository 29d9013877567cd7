"""Settings of a run that are often left slow: each is fine, or has the command that changes it. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts
from trainctl.protocol.advice.memory_fit import cap_of, fit_of
from trainctl.protocol.advice.node_speed import micro_of
from trainctl.protocol.batch.data_statistics import DataStatistics, data_size
from trainctl.protocol.batch.device_table import preset_of_device, types_of_device
from trainctl.protocol.batch.pass_curve import SMALL_GAIN
from trainctl.protocol.batch.settings_rules import (
    LACKS_MEMORY,
    PACKING,
    PRECISION,
    RECOMPUTED,
    RankSettings,
    unusual_settings,
)
from trainctl.protocol.calibration.peak import fastest_within_cap
from trainctl.protocol.config.families import ENCODER_DECODERS, TESTED
from trainctl.protocol.config.run_file import on_node
from trainctl.protocol.config.run_tables import ComputeDtype, NodeTable, RunFile
from trainctl.protocol.config.variables import platform_of

MANY_TRUNCATED: Final = 0.01
"""Part of samples that lose their end from which longer sequences are advised."""

_BEST_FIRST: Final[tuple[ComputeDtype, ...]] = ("bfloat16", "float16", "float32")

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
    """Return the checks of a run. `statistics`: of its data, None if they aren't on this machine; `caches`: where
    tokens are kept."""
    return (
        _precision(config, facts),
        _compile(config, facts),
        _attention(family),
        _checkpointing(config, facts),
        _packing(config, facts, statistics),
        _tokens(caches),
        _lengths(config, facts, statistics),
        *_preset(config, facts),
        *_micro_batches(facts),
        *_unusual(config, facts, statistics),
    )


def _set(facts: AdviceFacts, *settings: str) -> str:
    """The command with these settings. Those of a node name the others too: a run file without nodes would run on that
    node alone."""
    names = [node.name for node in facts.nodes]
    needed = len(names) > 1 and any(setting.startswith("nodes.") for setting in settings)
    return facts.run.command(*settings, nodes=names if needed else ())


def _precision(config: RunFile, facts: AdviceFacts) -> Check:
    dtype, computed = config.model.dtype, config.model.computed
    if dtype == "auto":
        return Check("precision", "ok", "auto: the best type that the devices of all ranks have")
    types = {node.name: types_of_device(node.device) for node in facts.nodes}
    narrow = next(one for one in _BEST_FIRST if not any(_lacks(its, one) for its in types.values()))
    if computed == narrow:
        return Check("precision", "ok", dtype)
    auto = _set(facts, PRECISION.change)
    slow = next((node for node in facts.nodes if _lacks(types[node.name], computed)), None)
    if slow is not None:
        text = f"{dtype}; {slow.device} of {slow.name} has no hardware for it: all would compute in {narrow}"
        return Check("precision", "change", text, auto)
    ratios = _products(facts, computed, narrow)
    unknown = [name for name, its in types.items() if its is None and name not in ratios]
    if unknown:
        return Check("precision", "unknown", f"{dtype}; products in {narrow} aren't measured on {', '.join(unknown)}")
    if not ratios and computed != "float32":
        return Check("precision", "ok", f"{dtype}: as fast as {narrow}, but it needs a loss scale")
    if not ratios:
        return Check("precision", "change", f"{dtype}; all devices compute faster in {narrow}", auto)
    slowest = min(ratios, key=lambda name: ratios[name])
    text = f"products in {narrow} are {ratios[slowest]:.2g} x as fast as in {dtype} on {slowest}"
    if not PRECISION.by_rank(RankSettings(products=ratios[slowest])):
        return Check("precision", "ok", f"{dtype}: {text}")
    return Check("precision", "change", text, _set(facts, f"model.dtype={narrow}"))


def _preset(config: RunFile, facts: AdviceFacts) -> Iterator[Check]:
    """Return where adapters start on the card that can do least. Calibrated cards have measured values instead."""
    bare = [node for node in facts.nodes if node.profile is None and config.adapter.kind != "full"]
    found = [(node, preset) for node in bare if (preset := preset_of_device(node.device)) is not None]
    if not found:
        return
    node, preset = min(found, key=lambda pair: pair[1].micro or math.inf)
    text = f"{preset.name}, as on {node.name}, starts with {preset.text}"
    changed = []
    if preset.micro is not None and isinstance(node.micro, int) and node.micro > preset.micro:
        changed.append(f"nodes.{node.name}.micro={preset.micro}")
    if preset.sequence_length is not None and config.data.sequence_length > preset.sequence_length:
        changed.append(f"data.sequence_length={preset.sequence_length}")
    command = _set(facts, *changed) if changed else ""
    yield Check("preset", "change" if changed else "ok", text, command)


def _lacks(types: tuple[ComputeDtype, ...] | None, dtype: ComputeDtype) -> bool:
    return types is not None and dtype != "float32" and dtype not in types


def _products(facts: AdviceFacts, dtype: str, narrow: str) -> dict[str, float]:
    ratios = {}
    for node in facts.nodes:
        profile = node.profile or node.other_profile
        rates = {one.dtype: one.gflops for one in profile.matmul} if profile is not None else {}
        if dtype in rates and narrow in rates:
            ratios[node.name] = rates[narrow] / rates[dtype]
    return ratios


def _compile(config: RunFile, facts: AdviceFacts) -> Check:
    modes = {node.name: on_node(config, node.name).model.compile for node in facts.nodes}
    slow = [node for node in facts.nodes if modes[node.name] == "off" and _gains_by_compiling(config, node)]
    ready, lacking = [node for node in slow if not node.compile_lacks], [node for node in slow if node.compile_lacks]
    text = _by_mode(modes)
    text += "".join(f"; {node.name} has no {' and no '.join(node.compile_lacks or ())} to compile" for node in lacking)
    if ready:
        text += "; on NVIDIA devices, compiled layers are usually faster, after the steps in which they are compiled"
        text += "".join(f"; whether {one.name} can compile isn't known" for one in ready if one.compile_lacks is None)
        return Check("compile", "change", text, _set(facts, *_compiled(config, facts, ready)))
    if slow or set(modes.values()) != {"off"}:
        return Check("compile", "ok", text)
    if config.model.base == "nf4":
        return Check("compile", "ok", "off: nf4 can't be compiled")
    if all(on_node(config, name).model.attention == "varlen" for name in modes):
        return Check("compile", "ok", "off: varlen attention can't be combined with it")
    return Check("compile", "ok", "off: it mainly helps NVIDIA devices")


def _gains_by_compiling(config: RunFile, node: NodeFacts) -> bool:
    model = on_node(config, node.name).model
    backend = node.backend or config.nodes.get(node.name, NodeTable()).backend
    can = model.base != "nf4" and model.attention != "varlen" and backend != "mlx"
    return can and platform_of("", node.device) == "NVIDIA GPU"


def _by_mode(modes: Mapping[str, str]) -> str:
    """`default`, or of nodes that differ `default on a, off on b`."""
    if len(set(modes.values())) == 1:
        return next(iter(modes.values()))
    named = {mode: [name for name, one in modes.items() if one == mode] for mode in dict.fromkeys(modes.values())}
    return ", ".join(f"{mode} on {' and '.join(names)}" for mode, names in named.items())


def _compiled(config: RunFile, facts: AdviceFacts, nodes: Sequence[NodeFacts]) -> list[str]:
    """The settings that compile on these nodes: one for all if no other node is changed by it."""
    own = any(table.compile is not None for table in config.nodes.values())
    if len(nodes) == len(facts.nodes) and not own:
        return ["model.compile=default"]
    return [f"nodes.{node.name}.compile=default" for node in nodes]


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
        has_caps = any(cap_of(node) is not None for node in facts.nodes)
        lacking = "how much the run needs isn't known: calibrate it" if has_caps else "the nodes' memory isn't known"
        return Check("checkpointing", "unknown", f"{mode}; {lacking}")
    worst = max(known, key=lambda name: known[name])
    text = f"{mode}; {worst} needs {known[worst]:.0%} of its memory"
    settings = RankSettings(checkpointing=mode, memory_part=known[worst])
    rule = next((rule for rule in (LACKS_MEMORY, RECOMPUTED) if rule.by_rank(settings)), None)
    return Check("checkpointing", "change" if rule else "ok", text, _set(facts, rule.change) if rule else "")


def _used_part(node: NodeFacts, facts: AdviceFacts) -> float | None:
    fit = fit_of(node, facts.run, micro_of(node, node.profile, facts.run), in_group=len(facts.nodes) > 1)
    return fit.needed_bytes / fit.cap_bytes if fit.needed_bytes is not None and fit.cap_bytes else None


def _packing(config: RunFile, facts: AdviceFacts, found: DataStatistics | None) -> Check:
    if config.data.kind == "text":
        return Check("packing", "ok", "text fills its blocks")
    if found is None:
        return Check("packing", "unknown", "the data aren't on this machine")
    if config.data.packing != "none":
        return Check("packing", "ok", config.data.packing)
    text = f"{found.padding:.0%} of a micro-batch is padding"
    if found.packs is None or not PACKING.by_rank(RankSettings(padding=found.padding)):
        return Check("packing", "ok", text)
    text += f"; {found.samples:,} {found.unit} would make {found.packs:,} packs"
    return Check("packing", "change", text, _set(facts, PACKING.change))


def _unusual(config: RunFile, facts: AdviceFacts, statistics: DataStatistics | None) -> Iterator[Check]:
    size = None if statistics is None or statistics.growing else data_size(statistics)
    for found in unusual_settings(config, size):
        yield Check("usual range", "change", found.text, _set(facts, found.change))


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
        now = micro_of(node, node.profile, facts.run)
        best = fastest_within_cap(node.profile.passes, facts.run.global_batch, cap_of(node))
        rate = next((one.rate for one in node.profile.passes if one.micro == now), None)
        if rate is None or best.micro == now or best.rate < (1 + SMALL_GAIN) * rate:
            known = (
                f"wasn't measured; {best.micro} is fastest" if rate is None else f"{rate / best.rate:.0%} of the peak"
            )
            text = f"{now} on {node.name}: {known}"
            yield Check("micro-batch", "ok" if rate is not None else "unknown", text)
        else:
            text = f"{now} on {node.name}: {best.micro} is {best.rate / rate - 1:+.0%}"
            yield Check("micro-batch", "change", text, _set(facts, f"nodes.{node.name}.micro={best.micro}"))
