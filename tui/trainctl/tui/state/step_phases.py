"""Phases of each of a rank's last steps, by the record and what came since, and when its model was compiled. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

import msgspec

from trainctl.protocol.messages import PHASES, RANK_COLUMNS, History, Phases, RunView, Series, peak_or_held
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting

COMPILE_METRIC: Final = "compile_seconds"
COMPILE_BUCKETS: Final = 240
"""Buckets of the whole run, in the first of two questions to the record; the second is about one of them."""


class Compilation(msgspec.Struct, frozen=True):
    """The compiler's time in a step, the longest of `first` to `last`."""

    first: int
    last: int
    seconds: float

    @property
    def text(self) -> str:
        """Return `41.0 s at step 1`."""
        at = f"at step {self.first:,}" if self.first == self.last else f"in steps {self.first:,} to {self.last:,}"
        return f"{formatting.seconds(self.seconds)} {at}"


def compilations(series: Series) -> list[Compilation]:
    """Return one for each bucket."""
    size = series.bucket_steps
    return [
        Compilation(max(first, 1), first + size - 1, seconds)
        for first, seconds in zip(series.steps, series.maximum, strict=True)
    ]


def longest_compilation(found: Iterable[Compilation]) -> Compilation | None:
    """Return the longest; of those that are alike, one whose step is known exactly; None without any."""
    return max(found, key=lambda one: (one.seconds, one.first - one.last), default=None)


def compiled_by_rank(histories: Sequence[History]) -> dict[int, Compilation]:
    """Return the longest of each rank."""
    every: dict[int, list[Compilation]] = {}
    for series in (series for history in histories for series in history.series):
        if series.metric == COMPILE_METRIC and series.rank is not None:
            every.setdefault(series.rank, []).extend(compilations(series))
    return {rank: found for rank, one in every.items() if (found := longest_compilation(one)) is not None}


def is_compiled(run: RunView) -> bool:
    """Return whether any rank says that it compiles its model."""
    return any(rank.compute is not None and rank.compute.compile != "off" for rank in run.ranks)


METRICS = (*(f"{name}_seconds" for name in PHASES), *RANK_COLUMNS)
"""Metrics of the record that this is made from."""
STEPS = 240
"""Newest steps that are asked for."""
MOST_BUCKETS = 16_000
"""Over all ranks and metrics, so that the answer stays far below the frame limit."""
MEAN_STEPS = 16
"""Steps that the means in the table are of."""


@dataclass(frozen=True)
class StepPhases:
    """One rank's step; in `phases` the wait for slower ranks is taken from the sum itself where that is known."""

    step: int
    phases: Phases
    memory_bytes: float | None  # its peak; where none is known, what was held after it

    @property
    def seconds(self) -> float:
        return float(sum(getattr(self.phases, name) for name in PHASES))


@dataclass(frozen=True)
class RecordedPhases:
    """A run's last steps in its record: rank -> step -> lap; and the compiler's time in all steps."""

    run: str = ""
    laps: Mapping[int, Mapping[int, StepPhases]] = field(default_factory=lambda: MappingProxyType({}))
    compiled: Mapping[int, Compilation] = field(default_factory=lambda: MappingProxyType({}))  # by rank


def columns_of(ranks: int) -> int:
    """Return how many steps to ask the record for."""
    return min(STEPS, MOST_BUCKETS // (len(METRICS) * max(ranks, 1)))


def past_of(run: str, history: History, compiled: Sequence[History] = ()) -> RecordedPhases:
    """Return the steps of a reply that has them one by one; a bucket of several says nothing of any of them.
    `compiled`: the replies on the compiler's time."""
    values: dict[int, dict[int, dict[str, float]]] = {}
    for series in history.series:
        if series.rank is None or series.bucket_steps != 1:
            continue
        for step, value in zip(series.steps, series.last, strict=True):
            values.setdefault(series.rank, {}).setdefault(step, {})[series.metric] = value
    laps = {rank: _whole(steps) for rank, steps in values.items()}
    return RecordedPhases(run, laps, compiled_by_rank(compiled))


def _whole(steps: Mapping[int, Mapping[str, float]]) -> dict[int, StepPhases]:
    made = {}
    for step, named in steps.items():
        phases = {name: named.get(f"{name}_seconds", math.nan) for name in PHASES}
        if all(math.isfinite(value) for value in phases.values()):
            made[step] = StepPhases(step, Phases(**phases), peak_or_held(named))
    return made


def laps(state: ViewState, past: RecordedPhases, rank: int) -> list[StepPhases]:
    """Return a rank's known last steps, oldest first."""
    ranks = (state.run.reporting if state.run else []) or sorted(state.laps)
    known = {other: _known(state, past, other) for other in {rank, *ranks}}
    return [_split(lap, [known[other].get(step) for other in ranks]) for step, lap in sorted(known[rank].items())]


def _known(state: ViewState, past: RecordedPhases, rank: int) -> dict[int, StepPhases]:
    run = state.run.run if state.run else ""
    found = dict(past.laps.get(rank, {})) if past.run == run else {}
    found |= {
        part.step: StepPhases(part.step, part.phases, part.peak_or_held_bytes) for part in state.laps.get(rank, ())
    }
    return found


def _split(lap: StepPhases, others: Sequence[StepPhases | None]) -> StepPhases:
    """Return a lap with its wait: what the least waiting rank didn't spend in sync; unknown unless all have reported
    the step."""
    syncs = [other.phases.sync for other in others if other is not None]
    if len(syncs) < 2 or len(syncs) < len(others):
        return lap
    own, waited = lap.phases, max(lap.phases.sync - min(syncs), 0.0)
    return replace(
        lap, phases=Phases(own.data, own.forward, own.backward, own.sync - waited, own.optimizer, own.wait + waited)
    )


def compiled(state: ViewState, past: RecordedPhases, rank: int) -> Compilation | None:
    """Return the compiler's time in the step of a rank that it slowed most; None if nothing is known to be compiled."""
    run, window = state.run.run if state.run else "", state.lately(COMPILE_METRIC, rank)
    live = zip(window.first.tolist(), window.last.tolist(), strict=True)
    recorded = [past.compiled[rank]] if past.run == run and rank in past.compiled else []
    return longest_compilation([*recorded, *(Compilation(step, step, seconds) for step, seconds in live)])


def means(found: Sequence[StepPhases]) -> dict[str, float]:
    """Return mean seconds of each phase over the last steps; empty without one."""
    newest = found[-MEAN_STEPS:]
    return {name: sum(getattr(lap.phases, name) for lap in newest) / len(newest) for name in PHASES if newest}
