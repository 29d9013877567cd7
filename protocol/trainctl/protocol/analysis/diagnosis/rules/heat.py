"""Causes that hold a device back: heat, a power cap, its hardware, a lower clock, a CPU quota."""

from collections import Counter
from collections.abc import Iterator
from statistics import median

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.rule import Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.rules.machine import by_node, impact, is_slower, without_slowdown
from trainctl.protocol.analysis.diagnosis.situation import Situation

CLOCK_LOWER = 0.1
"""Part by which a device's clock under load is below what it was."""
HEAVY_HEAT = 2
"""Level of macOS's thermal pressure that holds a chip back much."""
QUOTA_PERCENT, ALWAYS_PERCENT = 5.0, 50.0
"""Percent of quota periods in which processes were stopped: with slower passes, and by itself."""


def throttled(s: Situation) -> Iterator[Verdict]:
    """A device that heat, a power cap, its hardware or a quota holds back."""
    yield from by_node(s, _throttled)


def _throttled(s: Situation, node: str) -> Iterator[Verdict]:
    signs = [*_limits(s, node), *_quota(s, node), *_heat(s, node)]
    known = any(s.gpus(rank) for rank in s.ranks_of(node)) or any(
        s.reading(node, name) is not None for name in ("cpu_throttled_percent", "thermal_pressure")
    )
    if signs:
        why = signs[0][0]
        what_if = without_slowdown(s, node, f"{why} on {node}") or _by_clock(s, node, why)
        more = (impact(s, node),) if impact(s, node) else ()
        values = {"node": node}
        yield Found(f"{node} is held back by {why}", (*(line for _, line in signs), *more), node, what_if=what_if,
                    values=values)  # fmt: skip
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
                yield m.CLOCK_LIMITED_BY[limit], said
                return
        now, before = _clock(gpus), s.clock_before(rank)
        if now and before and now < (1 - CLOCK_LOWER) * before:
            yield "a lower clock", f"{gpus[-1].name}: {now:,.0f} MHz under load, {before:,.0f} MHz before"
            return


def _state(gpu: m.GpuReading) -> str:
    known = {"{:.0f} °C": gpu.temperature_celsius, "{:,.0f} MHz": gpu.clock_mhz, "{:.0f} W": gpu.power_watts}
    parts = [words.format(value) for words, value in known.items() if value is not None]
    return f", {', '.join(parts)}" if parts else ""


def _clock(gpus: list[m.GpuReading]) -> float | None:
    clocks = [gpu.clock_mhz for gpu in gpus if gpu.clock_mhz and (gpu.utilization_percent or 100) >= 50]
    return median(clocks) if clocks else None


def _by_clock(s: Situation, node: str, why: str) -> m.WhatIf | None:
    """The passes in proportion to the clock."""
    removed = {}
    for rank in s.ranks_of(node):
        now, before = _clock(s.gpus(rank)), s.clock_before(rank)
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
