"""The time that recent steps took each rank, and earlier ones: the numbers that rules compare."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.batch.step_model import Timing, middle
from trainctl.protocol.config.alert_rules import MIN_DATA_SECONDS, AlertsTable
from trainctl.protocol.messages import PHASES, Generation, RankStep

WINDOW_STEPS, WINDOW_SECONDS = 24, 12.0
"""Newest steps of one plan that are judged, and the seconds that they take, both at most. LEAST_STEPS always are."""
LASTING_SECONDS = 10.0
"""Seconds of steps over which a rank must be slow: shorter ones, such as of a tiny model, may meet a busy moment."""
LASTING_STEPS = 300
"""Steps that are enough instead, however short they are: a diagnosis reads some 400."""
LEAST_STEPS = 8
"""Steps below which nothing is concluded from their seconds."""
FIRST_STEPS = 2
"""Steps after a group has formed that don't count: devices compile and load."""
LEFT_OUT = 0.1
"""Part of the values at each end that a trimmed mean leaves out: a rare long step is no trouble."""

Parts = Mapping[int, RankStep]
"""A step's parts by rank."""


@dataclass(frozen=True)
class Pace:
    """One rank's steps of one share and micro-batch."""

    node: str
    samples: int
    micro: int  # 0: not known
    phases: Mapping[str, float]  # middle seconds by phase
    data_mean: float  # trimmed mean seconds: some steps wait for data and others don't
    busy: float  # middle seconds of data, forward and backward
    seconds: float  # middle seconds of the whole step

    @classmethod
    def of(cls, parts: Sequence[RankStep], times: float = 1.0) -> "Pace":
        """Return the pace of at least one step, each `times` as long."""
        phases = {name: times * middle([getattr(part.phases, name) for part in parts]) for name in PHASES}
        last, data = parts[-1], trimmed([part.phases.data for part in parts])
        busy, whole = middle([part.phases.busy for part in parts]), middle([part.step_seconds for part in parts])
        micro = last.micro_batch or 0
        return cls(last.node, last.samples, micro, phases, times * data, times * busy, times * whole)


def trimmed(values: Sequence[float]) -> float:
    """The mean without the highest and the lowest values, of at least one. Unlike a middle, it counts delays that half
    of the steps have."""
    ends = min(math.ceil(LEFT_OUT * len(values)), (len(values) - 1) // 2)
    kept = sorted(values)[ends : len(values) - ends]
    return sum(kept) / len(kept)


def waits_for_data(data_seconds: float, step_seconds: float, table: AlertsTable, times: float = 1.0) -> bool:
    """Return whether waits for data are long, by mean seconds of a step; `times`: factor of the run's thresholds."""
    is_large_part = data_seconds > times * table.data_wait_percent / 100 * step_seconds
    return is_large_part and data_seconds >= times * MIN_DATA_SECONDS


def by_step(facts: DiagnosisFacts) -> list[Parts]:
    """The ranks' parts of each step that all ranks of the newest one were in, oldest first."""
    found: dict[int, dict[int, RankStep]] = {}
    for part in facts.parts:
        found.setdefault(part.step, {})[part.rank] = part
    complete = [found[step] for step in sorted(found)]
    # Parts of the last step may be on their way.
    ranks = max((parts.keys() for parts in complete[-2:]), key=len, default=set[int]())
    return [parts for parts in complete if parts.keys() == ranks]


def present(steps: Sequence[Parts], first_step: int = 1) -> list[Parts]:
    """The steps of the present plan, without the first ones of its group. `first_step`: the run's own, after which no
    earlier one is missing."""
    start = len(steps) - 1
    while start > 0 and _plan(steps[start - 1]) == _plan(steps[-1]):
        start -= 1
    kept = [*steps[start:]]
    begins = bool(kept) and (start > 0 or next(iter(kept[0].values())).step == first_step)
    is_new_group = begins and (start == 0 or _generation(steps[start - 1]) != _generation(kept[0]))
    return kept[FIRST_STEPS if is_new_group else 0 :]


def recent(present_steps: Sequence[Parts]) -> list[Parts]:
    """The newest of these steps, as many as are judged."""
    newest = present_steps[-WINDOW_STEPS:]
    count = len(newest)
    while count > LEAST_STEPS and _seconds(newest[-count:]) > WINDOW_SECONDS:
        count -= 1
    return [*newest[-count:]] if count else []


def lasting(present_steps: Sequence[Parts], recent_steps: Sequence[Parts]) -> list[Parts]:
    """The recent steps, with as many before them as make up LASTING_SECONDS or LASTING_STEPS; empty if there are too
    few."""
    taken, count = _seconds(recent_steps), len(recent_steps)
    for parts in reversed(present_steps[: len(present_steps) - count]):
        if taken >= LASTING_SECONDS or count >= LASTING_STEPS:
            break
        taken, count = taken + _seconds([parts]), count + 1
    return [*present_steps[-count:]] if count and (taken >= LASTING_SECONDS or count >= LASTING_STEPS) else []


def _seconds(steps: Sequence[Parts]) -> float:
    return sum(max(part.step_seconds for part in parts.values()) for parts in steps)


def blocks_before(steps: Sequence[Parts], recent_steps: Sequence[Parts]) -> Iterator[list[Parts]]:
    """Blocks of earlier steps of the same plan, whatever their group."""
    if not recent_steps:
        return
    first = next(iter(recent_steps[0].values())).step
    alike = [
        parts
        for before, parts in pairwise([None, *steps])
        if parts is not None
        and next(iter(parts.values())).step < first
        and _work(parts) == _work(recent_steps[-1])
        and (before is None or _generation(before) == _generation(parts))
    ]
    for start in range(len(alike) % WINDOW_STEPS, len(alike), WINDOW_STEPS):
        yield alike[start : start + WINDOW_STEPS]


def paces(steps: Sequence[Parts]) -> dict[int, Pace]:
    """Return the paces by rank; none of too few steps."""
    if len(steps) < LEAST_STEPS:
        return {}
    return {rank: Pace.of([parts[rank] for parts in steps]) for rank in steps[-1]}


def timings(steps: Sequence[Parts]) -> dict[int, list[Timing]]:
    """Return the timings by rank, for the step models."""
    return {
        rank: [Timing.of(parts[rank].samples, parts[rank].phases, parts[rank].micro_batch or 0) for parts in steps]
        for rank in (steps[-1] if steps else ())
    }


def shared_sync(parts: Parts) -> float:
    """Seconds of a step's sum itself: those of the rank that waited least in it. 0 for one rank."""
    return min(part.phases.sync for part in parts.values()) if len(parts) > 1 else 0.0


def _work(parts: Parts) -> dict[int, tuple[int, int | None]]:
    return {rank: (part.samples, part.micro_batch) for rank, part in parts.items()}


def _generation(parts: Parts) -> Generation:
    return next(iter(parts.values())).generation


def _plan(parts: Parts) -> tuple[Generation, dict[int, tuple[int, int | None]]]:
    return _generation(parts), _work(parts)
