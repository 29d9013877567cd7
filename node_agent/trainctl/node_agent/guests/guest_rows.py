"""Messages of an attached run's program, in the form that clients and the record know."""

from collections.abc import Collection, Iterable, Sequence

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    METRICS,
    RANK_COLUMNS,
    AttachRun,
    Generation,
    GuestStep,
    RankState,
    RankStep,
    RankView,
    RunState,
    RunView,
    StepCommitted,
    Values,
    is_by_name,
)

MOST_OWN_METRICS = 64
"""Names of metrics beyond the table that one run may bring; values of further ones are left out."""
EVAL_LOSS = "eval_loss"
"""The metric of a run that the record has a table for: a loss on held-out samples."""
FIRST_GENERATION = Generation(1, 1)
"""First generation of an attached run; n grows each time that its program goes back to an earlier step."""
_DESCRIBED = ("run", "name", "started_at", "steps", "kind", "weight_unit", "loss_unit")
"""Fields of `RunView` that the program's own description has too."""


def view_of(request: AttachRun, node: str, directory: str, generation: Generation, step: int) -> RunView:
    """Return the run as its program describes it."""
    described = {name: getattr(request, name) for name in _DESCRIBED}
    ranks = []
    for rank in sorted(request.ranks, key=lambda rank: rank.rank):
        said = msgspec.structs.asdict(rank) | {"node": rank.node or node}
        ranks.append(RankView(state="run", since_at=request.started_at, share=None, **said))
    return RunView(
        state="running",
        lead=node,
        engine="",
        generation=generation,
        step=step,
        plan_version=0,
        ranks=tuple(ranks),
        directory=directory,
        global_batch=None,
        samples=None,
        cursor=None,
        learning_rate=None,
        **described,
    )


def going_on(view: RunView, before: RunView | None) -> RunView:
    """The view of a run that is attached again, with what its steps so far have said."""
    if before is None:
        return view
    is_same_process = [rank.pid for rank in view.ranks] == [rank.pid for rank in before.ranks]
    state = before.state if is_same_process and before.state in ("paused", "stopping") else view.state
    evaluated = (before.eval_loss, before.eval_step) if (before.eval_step or 0) <= view.step else (None, None)
    return msgspec.structs.replace(
        view,
        state=state,
        learning_rate=before.learning_rate,
        global_batch=before.global_batch,
        eval_loss=evaluated[0],
        eval_step=evaluated[1],
    )


def committed(
    view: RunView, made: GuestStep, before: StepCommitted | None
) -> tuple[StepCommitted, tuple[RankStep, ...]]:
    """A step and its ranks' parts; `before` is the newest step that is recorded."""
    nodes = {rank.rank: rank.node for rank in view.ranks}
    said = msgspec.structs.asdict(made)
    del said["parts"]
    said |= {"samples": made.samples or 0, "tokens": made.tokens or None}
    step = StepCommitted(
        run=view.run,
        generation=view.generation,
        cursor=None,
        plan_version=0,
        tokens_total=(before.tokens_total if before else 0.0) + (made.tokens or 0),
        weight_total=_sum(before.weight_total if before else None, made.weight),
        seconds_total=((before.seconds_total if before else None) or 0.0) + made.step_seconds,
        **said,
    )
    parts = tuple(
        RankStep(
            run=view.run,
            generation=view.generation,
            step=made.step,
            node=nodes.get(part.rank, view.lead),
            replays=0,
            **msgspec.structs.asdict(part) | {"tokens": part.tokens or 0.0, "samples": part.samples or 0},
        )
        for part in made.parts
    )
    return step, parts


def _sum(total: float | None, value: float | None) -> float | None:
    return total if value is None else (total or 0.0) + value


def check(steps: Sequence[GuestStep]) -> None:
    """Raises InvalidInputError for a metric by name that has a field or a column of its own."""
    for step in steps:
        for values in (step.values, *(part.values for part in step.parts)):
            for name in values.keys() & METRICS.keys():
                if not (is_by_name(name) or name in RANK_COLUMNS or (name == EVAL_LOSS and values is step.values)):
                    problem = f"{name} at step {step.step} has a field of its own, or is computed from other fields"
                    raise InvalidInputError("values", f"{problem}: leave it out of `values`")


def evaluated(made: GuestStep) -> tuple[float | None, GuestStep]:
    """The loss on held-out samples that came with a step, and the step without it."""
    values = dict(made.values)
    loss = values.pop(EVAL_LOSS, None)
    return loss, msgspec.structs.replace(made, values=values) if loss is not None else made


def after_step(view: RunView, made: GuestStep, eval_loss: float | None) -> RunView:
    """The view once a step is recorded."""
    view = msgspec.structs.replace(
        view, step=made.step, learning_rate=made.learning_rate, global_batch=made.global_batch
    )
    return view if eval_loss is None else msgspec.structs.replace(view, eval_loss=eval_loss, eval_step=made.step)


def silent(view: RunView, seconds: float, at: float) -> RunView:
    """Return the view of a run whose program has been silent for `seconds`."""
    return _with_ranks(view, "lost", at, f"its program has been silent for {seconds:.0f} s")


def heard(view: RunView, at: float) -> RunView:
    """Return the view of a run whose program is heard again; itself if it was not silent."""
    is_silent = any(rank.state == "lost" for rank in view.ranks)
    return _with_ranks(view, "paused" if view.state == "paused" else "run", at) if is_silent else view


def obeyed(view: RunView, verb: str | None, at: float) -> RunView:
    """Return the view once the loop has carried out an order."""
    match verb:
        case "pause":
            return _with_ranks(msgspec.structs.replace(view, state="paused"), "paused", at)
        case "resume":
            return going(view, at)
        case "stop":
            return msgspec.structs.replace(view, state="stopping")
        case _:
            return view


def going(view: RunView, at: float) -> RunView:
    """Return the view of a run that was paused and goes on; itself if it was not."""
    return view if view.state != "paused" else _with_ranks(msgspec.structs.replace(view, state="running"), "run", at)


def gone(view: RunView, pids: Collection[int], at: float) -> RunView:
    """Return the view of a run of some of whose ranks the processes are gone; itself if that was known."""
    ranks = tuple(
        msgspec.structs.replace(rank, state="failed", since_at=at, why="its process is gone")
        if rank.pid in pids and rank.state != "failed"
        else rank
        for rank in view.ranks
    )
    return view if ranks == view.ranks else msgspec.structs.replace(view, ranks=ranks)


def ended(view: RunView, state: RunState, reason: str, at: float) -> RunView:
    """Return the view of a run that is over."""
    view = _with_ranks(view, "failed" if state == "failed" else "done", at)
    return msgspec.structs.replace(view, state=state, reason=reason)


def _with_ranks(view: RunView, state: RankState, at: float, why: str = "") -> RunView:
    """Return the view with a state for all ranks but those that have failed."""
    ranks = (
        rank if rank.state == "failed" else msgspec.structs.replace(rank, state=state, since_at=at, why=why)
        for rank in view.ranks
    )
    return msgspec.structs.replace(view, ranks=tuple(ranks))


class OwnMetrics:
    """Names of a run's metrics beyond the table, the first MOST_OWN_METRICS of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {*names}

    def limited(self, made: GuestStep) -> GuestStep:
        """Return a step without values of further ones."""
        parts = tuple(msgspec.structs.replace(part, values=self._known(part.values)) for part in made.parts)
        return msgspec.structs.replace(made, values=self._known(made.values), parts=parts)

    def _known(self, values: Values) -> Values:
        own = values.keys() - METRICS.keys()
        if own <= self._names:
            return values
        self._names.update(sorted(own - self._names)[: MOST_OWN_METRICS - len(self._names)])
        return {name: value for name, value in values.items() if name in METRICS or name in self._names}
