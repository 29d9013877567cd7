"""The straggler of a run: the rank that the others wait for, by the medians of the ranks' last steps. Pure.

A rank is busy with data, forward and backward. In `sync` the faster ranks also wait for the slowest, so what the least
waiting rank spends there is the transfer itself, and what the others spend above it is their wait. Ranks are compared
over steps that all of them reported, for reports of one step don't come all at once.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import msgspec

from trainctl.protocol.messages import BUSY_PHASES, Generation, RankStep, RankView, StepCommitted, Straggler

KEPT_STEPS: Final = 16
"""Newest steps of the present plan that are compared."""
LOOK_STEPS: Final = 4
"""Steps between two looks, and from which on something is said about a plan."""
_ON_PART, _OFF_PART = 0.1, 0.05
"""The others wait for a straggler this part of its own time; once named it is one down to the second of them."""
_ON_SECONDS, _OFF_SECONDS = 0.002, 0.001
_LEVEL_PART = 0.02
"""Waits that differ by less than this part of a rank's own time count as equal."""
_SAME_PART = 0.2
"""Part by which its figures must change for the same straggler to be named again."""


def waits(steps: Mapping[int, RankStep]) -> dict[int, float]:
    """Return seconds each rank spent in sync waiting for slower ones; none are known unless all report the same
    step."""
    if len({step.step for step in steps.values()}) != 1:
        return {}
    transfer = min(step.phases.sync for step in steps.values())
    return {rank: max(step.phases.sync - transfer, 0.0) for rank, step in steps.items()}


def same_step(ranks: Iterable[RankView], parts: Iterable[RankStep]) -> dict[int, RankStep]:
    """Return the last step of each rank that reports, where it is the same one; empty while reports are still to
    come."""
    due = {rank.rank for rank in ranks if not rank.is_silent}
    newest = {part.rank: part for part in parts if part.rank in due}
    return newest if newest.keys() == due and len({part.step for part in newest.values()}) == 1 else {}


@dataclass(frozen=True)
class _Pace:
    busy: Mapping[str, float]  # by phase
    waiting: float  # sync and the wait for the plan

    @property
    def own(self) -> float:
        return sum(self.busy.values())


def _pace(steps: Sequence[RankStep]) -> _Pace:
    busy = {name: median(getattr(step.phases, name) for step in steps) for name in BUSY_PHASES}
    return _Pace(busy, median(step.phases.sync + step.phases.wait for step in steps))


def straggler_of(steps: Mapping[int, Sequence[RankStep]], was: Straggler | None = None) -> Straggler | None:
    """Return the straggler by the same steps of each rank: the one named before, else the busiest, if the others wait
    for it."""
    if len(steps) < 2:
        return None
    paces = {rank: _pace(own) for rank, own in steps.items()}
    named = None
    if was is not None and was.rank in paces:
        named = _judged(was.rank, paces, _OFF_PART, _OFF_SECONDS, slack=_OFF_PART)
    if named is None:
        busiest = max(paces, key=lambda rank: paces[rank].own)
        named = _judged(busiest, paces, _ON_PART, _ON_SECONDS, slack=_LEVEL_PART)
    return msgspec.structs.replace(named, node=steps[named.rank][-1].node) if named is not None else None


def _judged(rank: int, paces: Mapping[int, _Pace], part: float, seconds: float, *, slack: float) -> Straggler | None:
    own, others = paces[rank], [pace for other, pace in paces.items() if other != rank]
    waited = own.own - median(pace.own for pace in others)
    least = min(pace.waiting for pace in paces.values())
    if waited < max(part * own.own, seconds) or own.waiting > least + slack * own.own:
        return None
    excess = {name: own.busy[name] - median(pace.busy[name] for pace in others) for name in BUSY_PHASES}
    phase = max(excess, key=lambda name: excess[name])
    return Straggler(rank, "", phase, excess[phase], waited)


class StragglerWatch:
    """Takes ranks' parts of steps, as a run's lead has them, and names its straggler."""

    def __init__(self) -> None:
        self.named: Straggler | None = None
        self._plan: tuple[int, Generation] | None = None
        self._steps: dict[int, dict[int, RankStep]] = {}  # parts by step and rank

    def add(self, part: RankStep, step: StepCommitted, ranks: Collection[int]) -> None:
        """Take a part of a committed step that `ranks` report."""
        if (plan := (step.plan_version, step.generation)) != self._plan:
            self._plan, self._steps = plan, {}
        parts = self._steps.setdefault(part.step, {})
        parts[part.rank] = part
        if len(self._steps) > KEPT_STEPS:
            del self._steps[min(self._steps)]
        if part.step % LOOK_STEPS or len(parts) < len(ranks):
            return
        whole = [parts for parts in self._steps.values() if parts.keys() >= {*ranks}]
        if len(whole) < LOOK_STEPS:
            return
        named = straggler_of({rank: [parts[rank] for parts in whole] for rank in ranks}, self.named)
        if named is None or self.named is None or not _is_alike(self.named, named):
            self.named = named


def _is_alike(before: Straggler, now: Straggler) -> bool:
    figures = ((before.excess_seconds, now.excess_seconds), (before.waited_seconds, now.waited_seconds))
    same = (before.rank, before.phase) == (now.rank, now.phase)
    return same and all(abs(new - old) <= _SAME_PART * old for old, new in figures)
