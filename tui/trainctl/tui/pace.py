"""How fast the ranks are, and who is waited for: figures over each rank's last steps, pure.

A rank is busy with data, forward and backward. In `sync` the faster ranks also wait for the slowest, so what the least
waiting rank spends there is the transfer itself, and what the others spend above it is their wait.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from trainctl.protocol import messages as m

if TYPE_CHECKING:
    from trainctl.tui.model import ViewState  # NumPy: not for the command line

OUT_STATES = frozenset({"lost", "failed", "drained", "done"})
"""A rank in one of these has no part in the next step."""
BUSY_PHASES = ("data", "forward", "backward")
_NEWEST = 8
_STRAGGLER_PART = 0.1
"""A straggler is busy this much longer than the others' median, as a part of its own time."""
_STRAGGLER_SECONDS = 0.002


class Straggler(NamedTuple):
    """The rank that the others wait for, the phase that makes it so, and by how much it is over the others there."""

    rank: int
    node: str
    phase: str
    excess_seconds: float  # of that phase, over the others' median
    waited_seconds: float  # that the others' median waits a step


class Pace(NamedTuple):
    """A rank's typical step, in seconds; `floor` is what it takes besides its samples and waits for nobody."""

    samples_per_second: float | None
    floor: float


def busy_seconds(phases: m.Phases) -> float:
    """Data, forward and backward."""
    return phases.data + phases.forward + phases.backward


def live_ranks(run: m.RunView | None) -> tuple[m.RankView, ...]:
    """Ranks that take part, by number."""
    ranks = run.ranks if run else ()
    return tuple(sorted((view for view in ranks if view.state not in OUT_STATES), key=lambda view: view.rank))


def transfer_seconds(steps: Iterable[m.RankStep]) -> float:
    """Of one step's ranks: what the one that waits least spends in sync; none where a rank is alone."""
    seconds = [step.phases.sync for step in steps]
    return min(seconds, default=0.0)


def waits(steps: Mapping[int, m.RankStep]) -> dict[int, float]:
    """Seconds each rank spent in sync waiting for slower ones, of ranks that report the same newest step."""
    newest = max((step.step for step in steps.values()), default=0)
    same = {rank: step for rank, step in steps.items() if step.step == newest}
    if len(same) < 2:
        return {}
    transfer = transfer_seconds(same.values())
    return {rank: max(step.phases.sync - transfer, 0.0) for rank, step in same.items()}


def paces(state: "ViewState") -> dict[int, Pace]:
    """Each live rank's pace by its last steps; the transfer and the wait for the plan are the least of the group."""
    known = {view.rank: state.parts.get(view.rank, ())[-_NEWEST:] for view in live_ranks(state.run)}
    found = {rank: steps for rank, steps in known.items() if steps}
    if not found:
        return {}
    transfer = min(_median(step.phases.sync for step in steps) for steps in found.values())
    plan = min(_median(step.phases.wait for step in steps) for steps in found.values())
    return {
        rank: Pace(_rate(steps), transfer + plan + _median(step.phases.optimizer for step in steps))
        for rank, steps in found.items()
    }


def straggler(state: "ViewState") -> Straggler | None:
    """The live rank that the others wait for, if they wait more than a tenth of its time; None if nobody does."""
    views = live_ranks(state.run)
    typical = {view.rank: _typical(state.parts.get(view.rank, ())) for view in views}
    if len(views) < 2 or any(phases is None for phases in typical.values()):
        return None
    known = {rank: phases for rank, phases in typical.items() if phases is not None}
    slowest = max(known, key=lambda rank: sum(known[rank].values()))
    others = [phases for rank, phases in known.items() if rank != slowest]
    own = sum(known[slowest].values())
    waited = own - statistics.median(sum(phases.values()) for phases in others)
    if waited < max(_STRAGGLER_PART * own, _STRAGGLER_SECONDS):
        return None
    excess = {name: known[slowest][name] - statistics.median(phases[name] for phases in others) for name in BUSY_PHASES}
    phase = max(excess, key=lambda name: excess[name])
    node = next(view.node for view in views if view.rank == slowest)
    return Straggler(slowest, node, phase, excess[phase], waited)


def _typical(steps: tuple[m.RankStep, ...]) -> dict[str, float] | None:
    """Median seconds of each busy phase over the last steps of the present share; None where there is none."""
    steps = tuple(step for step in steps if step.samples == steps[-1].samples and busy_seconds(step.phases) > 0)
    if not steps:
        return None
    return {name: _median(getattr(step.phases, name) for step in steps) for name in BUSY_PHASES}


def _rate(steps: tuple[m.RankStep, ...]) -> float | None:
    rates = [step.samples / busy_seconds(step.phases) for step in steps if busy_seconds(step.phases) > 0]
    return statistics.median(rates) if rates and max(rates) > 0 else None


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)
