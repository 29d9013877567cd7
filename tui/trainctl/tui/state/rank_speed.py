"""The ranks' speed, and who is waited for: figures over each rank's last steps, pure.

A rank is busy with data, forward and backward. In `sync` the faster ranks also wait for the slowest, so what the least
waiting rank spends there is the transfer itself, and what the others spend above it is their wait. Ranks are compared
over steps that all of them reported, for reports of one step don't come all at once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from trainctl.protocol.messages import BUSY_PHASES, RankStep, RankView, RunView

OUT_STATES = frozenset({"lost", "rejoining", "failed", "drained", "done"})
"""A rank in one of these has no part in the next step."""
SILENT_STATES = frozenset({"hung", "lost", "rejoining", "failed", "drained"})
"""A rank in one of these reports no steps."""
HELD_STATES = frozenset({"drained", "failed"})
"""A rank in one of these stays out until it is admitted; one that is lost joins by itself once it is back."""
FEW_STEPS = 4
"""Steps from which on something is said about a plan."""
_ON_PART, _OFF_PART = 0.1, 0.05
"""The others wait for a straggler this part of its own time; once named it is one down to the second of them."""
_ON_SECONDS, _OFF_SECONDS = 0.002, 0.001
_LEVEL_PART = 0.02
"""Waits that differ by less than this part of a rank's own time count as equal."""


@dataclass(frozen=True)
class Straggler:
    """The rank that the others wait for, the phase that makes it so, and by how much it is over the others there."""

    rank: int
    node: str
    phase: str
    excess_seconds: float  # of that phase, over the others' median
    waited_seconds: float  # that the others' median waits a step


@dataclass(frozen=True)
class Typical:
    """Medians of one rank's last steps, in seconds."""

    busy: Mapping[str, float]  # by phase
    waiting: float  # sync and the wait for the plan

    @property
    def own(self) -> float:
        return sum(self.busy.values())


def live_ranks(run: RunView | None) -> tuple[RankView, ...]:
    """Return ranks that take part, by number."""
    ranks = run.ranks if run else ()
    return tuple(sorted((view for view in ranks if view.state not in OUT_STATES), key=lambda view: view.rank))


def reporting(run: RunView | None) -> list[int]:
    """Return ranks that report their steps, or did to the run's end."""
    return sorted(view.rank for view in (run.ranks if run else ()) if view.state not in SILENT_STATES)


def waits(steps: Mapping[int, RankStep]) -> dict[int, float]:
    """Return seconds each rank spent in sync waiting for slower ones; none are known unless all report the same
    step."""
    if len({step.step for step in steps.values()}) != 1:
        return {}
    transfer = min(step.phases.sync for step in steps.values())  # what the one that waits least spends there
    return {rank: max(step.phases.sync - transfer, 0.0) for rank, step in steps.items()}


def same_step(ranks: Iterable[RankView], parts: Iterable[RankStep]) -> dict[int, RankStep]:
    """Return the last step of each rank that reports, where it is the same one; empty while reports are still to
    come."""
    due = {rank.rank for rank in ranks if rank.state not in SILENT_STATES}
    found = {part.rank: part for part in parts if part.rank in due}
    return found if found.keys() == due and len({part.step for part in found.values()}) == 1 else {}


def straggler_of_step(parts: Mapping[int, RankStep]) -> Straggler | None:
    """Return the straggler of one step that all these ranks reported; None where they report different ones."""
    if len(parts) < 2 or len({part.step for part in parts.values()}) != 1:
        return None
    of_step = {rank: typical([part]) for rank, part in parts.items()}
    return straggler_of(of_step, {rank: part.node for rank, part in parts.items()}, None)


def straggler_of(typical: Mapping[int, Typical], node_of: Mapping[int, str], was: Straggler | None) -> Straggler | None:
    """Return the straggler by the ranks' typical steps: the one named before, else the busiest, where the others wait
    for it."""
    busiest = max(typical, key=lambda rank: typical[rank].own)
    if was is not None and was.rank in typical:
        kept = _judged(was.rank, typical, node_of, _OFF_PART, _OFF_SECONDS, slack=_OFF_PART)
        if kept is not None:
            return kept
    return _judged(busiest, typical, node_of, _ON_PART, _ON_SECONDS, slack=_LEVEL_PART)


def _judged(
    rank: int, typical: Mapping[int, Typical], node_of: Mapping[int, str], part: float, seconds: float, *, slack: float
) -> Straggler | None:
    mine, others = typical[rank], [item for other, item in typical.items() if other != rank]
    waited = mine.own - median(item.own for item in others)
    least = min(item.waiting for item in typical.values())
    if waited < max(part * mine.own, seconds) or mine.waiting > least + slack * mine.own:
        return None
    excess = {name: mine.busy[name] - median(item.busy[name] for item in others) for name in BUSY_PHASES}
    phase = max(excess, key=lambda name: excess[name])
    return Straggler(rank, node_of[rank], phase, excess[phase], waited)


def typical(steps: Iterable[RankStep]) -> Typical:
    """Return the medians of a rank's steps."""
    steps = list(steps)
    busy = {name: median(getattr(step.phases, name) for step in steps) for name in BUSY_PHASES}
    return Typical(busy, median(step.phases.sync + step.phases.wait for step in steps))
