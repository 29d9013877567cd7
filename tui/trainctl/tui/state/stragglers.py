"""Who is waited for, and how fast each rank is, by the steps that a state keeps of each: pure."""

from collections.abc import Iterable

from trainctl.protocol import messages as m
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel, Timing, models
from trainctl.tui.state.rank_speed import FEW_STEPS, SILENT_STATES, Straggler, reporting, straggler_of, typical
from trainctl.tui.state.view_state import ViewState

_NEWEST = 8


def common_parts(state: ViewState) -> dict[int, m.RankStep]:
    """The newest step that all ranks which report have reported; empty where there is none."""
    parts = {rank: state.parts.get(rank, ()) for rank in reporting(state.run)}
    if not parts or not all(parts.values()):
        return {}
    step = min(own[-1].step for own in parts.values())  # nearly always the one
    newest = {rank: part for rank, own in parts.items() for part in own[-2:] if part.step == step}
    if len(newest) == len(parts):
        return newest
    return {rank: steps[-1] for rank, steps in _common(state, 0).items()}


def awaited(state: ViewState, step: int) -> bool:
    """Whether a rank that has reported before still has to report this step; quickly told, for it is asked at each
    report, and reports come in the order of the ranks."""
    for view in reversed(state.run.ranks if state.run else ()):
        own = state.parts.get(view.rank)
        if own and own[-1].step < step and view.state not in SILENT_STATES:
            return True
    return False


def _common(state: ViewState, first_step: int) -> dict[int, list[m.RankStep]]:
    """Each reporting rank's parts of the steps from `first_step` on that all of them reported, oldest first."""
    by_rank = {
        rank: {part.step: part for part in state.parts.get(rank, ()) if part.step >= first_step}
        for rank in reporting(state.run)
    }
    known = set.intersection(*(set(parts) for parts in by_rank.values())) if by_rank else set()
    return {rank: [parts[step] for step in sorted(known)] for rank, parts in by_rank.items()} if known else {}


def paces(state: ViewState, views: Iterable[m.RankView]) -> dict[int, StepModel]:
    """What a step takes each rank, by its last ones, and by its curve if that is known: then steps of other
    micro-batches count too."""
    views = [*views]
    parts = {view.rank: (state.laps if view.passes else state.parts).get(view.rank, ())[-_NEWEST:] for view in views}
    curves = {view.rank: PassCurve(view.passes) for view in views if view.passes}
    timings = {
        rank: [Timing.of(part.samples, part.phases, 0 if part.replays else part.micro_batch or 0) for part in steps]
        for rank, steps in parts.items()
    }
    return models(timings, curves)


def named_straggler(state: ViewState) -> Straggler | None:
    """The one judged at the last common step, while the run goes on and it takes part."""
    slow, run = state.slow, state.run
    return slow if slow and run and run.state == "running" and slow.rank in reporting(run) else None


def straggler(state: ViewState, was: Straggler | None = None) -> Straggler | None:
    """The rank that waits least while the others wait for it, by the steps of the present plan that all reported.

    None if nobody does, or before `FEW_STEPS` of them. The node named by `was` stays so until it is clearly none.
    """
    common = _common(state, state.plan_step)
    if len(common) < 2 or min(len(steps) for steps in common.values()) < FEW_STEPS:
        return None
    node_of = {rank: steps[-1].node for rank, steps in common.items()}
    return straggler_of({rank: typical(steps) for rank, steps in common.items()}, node_of, was)
