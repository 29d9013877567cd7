"""Watches each rank's last 200 steps: waits for data, memory that grows to its cap, and a device that is often idle.

A step only adds a few numbers; every LOOK_EVERY_STEPS steps a rank is judged, so that many ranks cost little.
"""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final

from trainctl.node_agent.alerts.conditions import Observation, Said, gigabytes
from trainctl.protocol.analysis.diagnosis.pace import waits_for_data
from trainctl.protocol.analysis.rolling import RollingStatistics
from trainctl.protocol.config.alert_rules import AlertsTable
from trainctl.protocol.messages import CLOCK_LIMITED_BY, ClockLimit, GpuReading, HostReading, Phases, RankStep
from trainctl.protocol.messages.event_prose import seconds

WINDOW_STEPS: Final = 200
"""Steps by which a rank is judged; waits for data by the later half."""
LOOK_EVERY_STEPS: Final = 20
"""Steps between two looks at a rank."""
DATA_CLEAR_PART: Final = 0.8
"""Part of the threshold below which waiting for data is over."""
BUSY_READINGS: Final = 60
"""Readings at 1 Hz whose median is a device's use."""
BUSY_CLEAR_PERCENT: Final = 3.0
"""Percentage points above the threshold from which a device counts as busy again."""
MIN_WAIT_PART: Final = 0.05
"""Part of the steps from which a wait explains that a device is idle."""
_STANDARD_ERRORS: Final = 3.0
"""Standard errors of a slope beyond which memory grows."""
_LEAST_GROWTH: Final = 0.01
"""Part of the cap by which memory must grow within the window."""


@dataclass(frozen=True)
class _Step:
    step: int
    seconds: float
    phases: Phases
    used_bytes: float | None  # peak, or held where no peak is known
    cap_bytes: float | None


@dataclass(frozen=True)
class _Use:
    percent: float  # of the device's time
    limits: tuple[ClockLimit, ...]


@dataclass(frozen=True)
class Growth:
    """A rank's memory that grows."""

    bytes_per_step: float
    used_bytes: float
    cap_bytes: float
    full_step: int  # the step at which it reaches its cap


class RankHealthWatch:
    """Takes ranks' parts of steps and machines' readings."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._steps: dict[int, deque[_Step]] = {}
        self._used: dict[int, deque[_Use]] = {}  # of each rank's device

    def part(self, part: RankStep, last_step: int | None) -> list[Observation]:
        """A rank's part of a step; `last_step` is the run's, None if it is not known."""
        kept = self._steps.setdefault(part.rank, deque(maxlen=WINDOW_STEPS))
        while kept and kept[-1].step >= part.step:
            kept.pop()
        used, cap = part.peak_or_held_bytes, part.memory_cap_bytes
        kept.append(_Step(part.step, part.step_seconds, part.phases, used, cap))
        if len(kept) < WINDOW_STEPS // 2 or (part.step + part.rank) % LOOK_EVERY_STEPS:
            return []
        return [self._data(part, kept), *self._memory(part, kept, last_step)]

    def reading(self, reading: HostReading, ranks: Mapping[int, str | None]) -> list[Observation]:
        """A machine's reading, with the devices of the ranks that are at work on it."""
        found = []
        for rank, device in ranks.items():
            gpu = reading.gpu_of(device)
            if gpu is None or gpu.utilization_percent is None:
                continue
            used = self._used.setdefault(rank, deque(maxlen=BUSY_READINGS))
            used.append(_Use(gpu.utilization_percent, gpu.clock_limits))
            if len(used) == BUSY_READINGS:
                found.append(self._busy(reading.node, rank, [*used], gpu))
        return found

    def forget(self, rank: int) -> None:
        """A rank that is out, or gone."""
        self._steps.pop(rank, None)
        self._used.pop(rank, None)

    # ------------------------------------------------------------ data

    def _data(self, part: RankStep, kept: deque[_Step]) -> Observation:
        recent = [*kept][-WINDOW_STEPS // 2 :]
        data, whole = math.fsum(one.phases.data for one in recent), math.fsum(one.seconds for one in recent)
        each, step = data / len(recent), whole / len(recent)
        bad = waits_for_data(each, step, self._table)
        good = not waits_for_data(each, step, self._table, DATA_CLEAR_PART)
        say = partial(_say_data, each, step, len(recent))
        return Observation("data-wait", bad, good, say, part.node, part.rank)

    # ------------------------------------------------------------ memory

    def _memory(self, part: RankStep, kept: deque[_Step], last_step: int | None) -> list[Observation]:
        if len(kept) < WINDOW_STEPS or last_step is None:
            return []
        found = growth(kept)
        left = max(last_step - part.step, 0)
        bad = found is not None and found.full_step - part.step <= left
        return [Observation("memory-rise", bad, not bad, partial(_say_growth, found, last_step), part.node, part.rank)]

    # ------------------------------------------------------------ device

    def _busy(self, node: str, rank: int, used: list[_Use], gpu: GpuReading) -> Observation:
        least, percent = self._table.device_busy_percent, median(one.percent for one in used)
        limits = Counter(limit for one in used for limit in one.limits)
        mostly = [limit for limit, count in limits.most_common() if count > len(used) / 2]
        say = partial(_say_idle, percent, gpu, [*self._steps.get(rank, ())][-WINDOW_STEPS // 2 :], mostly)
        return Observation("device-idle", percent < least, percent > least + BUSY_CLEAR_PERCENT, say, node, rank)


def growth(kept: deque[_Step]) -> Growth | None:
    """Return the growth of a rank's memory over a window, if it grows in both halves of it by more than chance: a jump
    is in one half alone. None if it doesn't, or if its memory or cap is not known."""
    cap = kept[-1].cap_bytes
    slopes = []
    for half in ([*kept][: len(kept) // 2], [*kept][len(kept) // 2 :]):
        rolling = RollingStatistics(len(half))
        for one in half:
            rolling.add(one.step, one.used_bytes)
        slope, std = rolling.trend, rolling.std
        if not rolling.is_full or slope is None or std is None:
            return None
        error = std * math.sqrt(12 / len(half) ** 3)
        if slope <= _STANDARD_ERRORS * error:
            return None
        slopes.append(slope)
    per_step, used = min(slopes), kept[-1].used_bytes
    if not cap or used is None or per_step * len(kept) < _LEAST_GROWTH * cap:
        return None
    return Growth(per_step, used, cap, kept[-1].step + max(math.ceil((cap - used) / per_step), 0))


def _say_data(each: float, step: float, count: int) -> Said:
    percent = 100 * each / step if step > 0 else 0.0
    text = f"waits for data: {percent:.0f} % of the step, {seconds(each)} of {seconds(step)}"
    advice = "raise data.prefetch or data.workers; trainctl data bench finds what limits the reading"
    return Said(text, (f"mean of the last {count} steps",), (advice,))


def _say_growth(found: Growth | None, last_step: int) -> Said:
    if found is None:
        return Said("memory no longer grows")
    text = (
        f"memory grows by {found.bytes_per_step / 1e6:.2g} MB per step: {gigabytes(found.used_bytes)} of"
        f" {gigabytes(found.cap_bytes)}, full at about step {found.full_step:,} of {last_step:,}"
    )
    return Said(
        text,
        (f"the peak rose in both halves of the last {WINDOW_STEPS} steps",),
        (
            "write a checkpoint, stop the run and resume it: new processes start with the memory that they need",
            "a smaller micro-batch leaves more room; the loss doesn't change",
        ),
    )


def _say_idle(percent: float, gpu: GpuReading, recent: list[_Step], limits: Sequence[ClockLimit]) -> Said:
    """A limited clock comes first: it makes everything else slow."""
    if limits:
        reason, advice = f"its clock is limited by {CLOCK_LIMITED_BY[limits[0]]}", _LIMITED[limits[0]]
    else:
        reason, advice = _idle_reason(recent)
    text = f"device busy {percent:.0f} % of the time{f': {reason}' if reason else ''}"
    return Said(text, (f"{gpu.name}, median of the last {BUSY_READINGS} s",), (advice,) if advice else ())


_LIMITED: Final[dict[ClockLimit, str]] = {
    "thermal": "cool the machine, or give it fewer samples",
    "power": "raise the device's power limit, or give it fewer samples",
    "hardware": "check its power supply, cables and cooling",
}
"""By what lowers the device's clock: what to do."""
_REASONS: Final = {
    "data": ("it waits for data", "raise data.prefetch or data.workers"),
    "sync": (
        "it waits for the sum of gradients and for slower ranks",
        "give slower ranks fewer samples (rebalance auto), or raise the global batch so that ranks sum less often",
    ),
    "wait": ("it waits for the lead's next plan", "look at the lead's load and the round trip to it"),
}
"""By phase: why a device is idle, and what to do."""


def _idle_reason(recent: list[_Step]) -> tuple[str, str]:
    """Return the wait that takes most of the steps, if one takes more than MIN_WAIT_PART; else the passes are small."""
    whole = math.fsum(one.seconds for one in recent)
    if whole <= 0:
        return "", ""
    taken = {name: math.fsum(getattr(one.phases, name) for one in recent) / whole for name in _REASONS}
    name = max(taken, key=lambda one: taken[one])
    if taken[name] > MIN_WAIT_PART:
        reason, advice = _REASONS[name]
        return f"{reason} {100 * taken[name]:.0f} % of the step", advice
    return "it waits for the next operation within passes", "a larger micro-batch keeps it busy"
