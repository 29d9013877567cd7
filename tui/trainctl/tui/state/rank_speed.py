"""How fast the ranks are, and who is waited for: figures over each rank's last steps, pure.

A rank is busy with data, forward and backward. In `sync` the faster ranks also wait for the slowest, so what the least
waiting rank spends there is the transfer itself, and what the others spend above it is their wait. Ranks are compared
over steps that all of them reported, for reports of one step don't come all at once.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.batch.apportion import Speed, Timing, speeds

if TYPE_CHECKING:
    from trainctl.tui.state.view_state import ViewState  # NumPy: not for the command line

OUT_STATES = frozenset({"lost", "rejoining", "failed", "drained", "done"})
"""A rank in one of these has no part in the next step."""
SILENT_STATES = frozenset({"hung", "lost", "rejoining", "failed", "drained"})
"""A rank in one of these reports no steps."""
HELD_STATES = frozenset({"drained", "failed"})
"""A rank in one of these stays out until it is admitted; one that is lost joins by itself once it is back."""
BUSY_PHASES = ("data", "forward", "backward")
FEW_STEPS = 4
"""From how many steps on something is said of a plan."""
_NEWEST = 8
_ON_PART, _OFF_PART = 0.1, 0.05
"""The others wait for a straggler this part of its own time; once named it is one down to the second of them."""
_ON_SECONDS, _OFF_SECONDS = 0.002, 0.001
_LEVEL_PART = 0.02
"""Waits that differ by less than this part of a rank's own time count as equal."""


class Straggler(NamedTuple):
    """The rank that the others wait for, the phase that makes it so, and by how much it is over the others there."""

    rank: int
    node: str
    phase: str
    excess_seconds: float  # of that phase, over the others' median
    waited_seconds: float  # that the others' median waits a step


class Typical(NamedTuple):
    """Medians of one rank's last steps, in seconds."""

    busy: Mapping[str, float]  # by phase
    waiting: float  # sync and the wait for the plan

    @property
    def own(self) -> float:
        return sum(self.busy.values())


def live_ranks(run: m.RunView | None) -> tuple[m.RankView, ...]:
    """Ranks that take part, by number."""
    ranks = run.ranks if run else ()
    return tuple(sorted((view for view in ranks if view.state not in OUT_STATES), key=lambda view: view.rank))


def reporting(run: m.RunView | None) -> list[int]:
    """Ranks that report their steps, or did to the run's end."""
    return sorted(view.rank for view in (run.ranks if run else ()) if view.state not in SILENT_STATES)


def transfer_seconds(steps: Iterable[m.RankStep]) -> float:
    """Of one step's ranks: what the one that waits least spends in sync; none where a rank is alone."""
    seconds = [step.phases.sync for step in steps]
    return min(seconds, default=0.0)


def waits(steps: Mapping[int, m.RankStep]) -> dict[int, float]:
    """Seconds each rank spent in sync waiting for slower ones; none are known unless all report the same step."""
    if len({step.step for step in steps.values()}) != 1:
        return {}
    transfer = transfer_seconds(steps.values()) if len(steps) > 1 else max(s.phases.sync for s in steps.values())
    return {rank: max(step.phases.sync - transfer, 0.0) for rank, step in steps.items()}


def same_step(ranks: Iterable[m.RankView], parts: Iterable[m.RankStep]) -> dict[int, m.RankStep]:
    """The last step of each rank that reports, where it is the same one; empty while reports are still to come."""
    due = {rank.rank for rank in ranks if rank.state not in SILENT_STATES}
    found = {part.rank: part for part in parts if part.rank in due}
    return found if found.keys() == due and len({part.step for part in found.values()}) == 1 else {}


def common_parts(state: "ViewState") -> dict[int, m.RankStep]:
    """The newest step that all ranks which report have reported; empty where there is none."""
    parts = {rank: state.parts.get(rank, ()) for rank in reporting(state.run)}
    if not parts or not all(parts.values()):
        return {}
    step = min(own[-1].step for own in parts.values())  # nearly always the one
    newest = {rank: part for rank, own in parts.items() for part in own[-2:] if part.step == step}
    if len(newest) == len(parts):
        return newest
    return {rank: steps[-1] for rank, steps in _common(state, 0).items()}


def awaited(state: "ViewState", step: int) -> bool:
    """Whether a rank that has reported before still has to report this step; quickly told, for it is asked at each
    report, and reports come in the order of the ranks."""
    for view in reversed(state.run.ranks if state.run else ()):
        own = state.parts.get(view.rank)
        if own and own[-1].step < step and view.state not in SILENT_STATES:
            return True
    return False


def _common(state: "ViewState", first_step: int) -> dict[int, list[m.RankStep]]:
    """Each reporting rank's parts of the steps from `first_step` on that all of them reported, oldest first."""
    by_rank = {
        rank: {part.step: part for part in state.parts.get(rank, ()) if part.step >= first_step}
        for rank in reporting(state.run)
    }
    known = set.intersection(*(set(parts) for parts in by_rank.values())) if by_rank else set()
    return {rank: [parts[step] for step in sorted(known)] for rank, parts in by_rank.items()} if known else {}


def paces(state: "ViewState", views: Iterable[m.RankView]) -> dict[int, Speed]:
    """Each rank's speed by its last steps."""
    parts = {view.rank: state.parts.get(view.rank, ())[-_NEWEST:] for view in views}
    return speeds({rank: [Timing(part.samples, part.phases) for part in steps] for rank, steps in parts.items()})


def named_straggler(state: "ViewState") -> Straggler | None:
    """The one judged at the last common step, while the run goes on and it takes part."""
    slow, run = state.slow, state.run
    return slow if slow and run and run.state == "running" and slow.rank in reporting(run) else None


def straggler(state: "ViewState", was: Straggler | None = None) -> Straggler | None:
    """The rank that waits least while the others wait for it, by the steps of the present plan that all reported.

    None if nobody does, or before `FEW_STEPS` of them. Whoever `was` named stays so until it is clearly none.
    """
    common = _common(state, state.plan_step)
    if len(common) < 2 or min(len(steps) for steps in common.values()) < FEW_STEPS:
        return None
    node_of = {rank: steps[-1].node for rank, steps in common.items()}
    return straggler_of({rank: _typical(steps) for rank, steps in common.items()}, node_of, was)


def straggler_of_step(parts: Mapping[int, m.RankStep]) -> Straggler | None:
    """The straggler of one step that all these ranks reported; None where they report different ones."""
    if len(parts) < 2 or len({part.step for part in parts.values()}) != 1:
        return None
    typical = {rank: _typical([part]) for rank, part in parts.items()}
    return straggler_of(typical, {rank: part.node for rank, part in parts.items()}, None)


def straggler_of(typical: Mapping[int, Typical], node_of: Mapping[int, str], was: Straggler | None) -> Straggler | None:
    """Of ranks' typical steps: the one named before, else the busiest, where the others wait for it."""
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
    waited = mine.own - _median(item.own for item in others)
    least = min(item.waiting for item in typical.values())
    if waited < max(part * mine.own, seconds) or mine.waiting > least + slack * mine.own:
        return None
    excess = {name: mine.busy[name] - _median(item.busy[name] for item in others) for name in BUSY_PHASES}
    phase = max(excess, key=lambda name: excess[name])
    return Straggler(rank, node_of[rank], phase, excess[phase], waited)


def _typical(steps: Iterable[m.RankStep]) -> Typical:
    steps = list(steps)
    busy = {name: _median(getattr(step.phases, name) for step in steps) for name in BUSY_PHASES}
    return Typical(busy, _median(step.phases.sync + step.phases.wait for step in steps))


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
