"""Messages of an attached run's program, in the form that clients and the record know; pure."""

from collections.abc import Sequence

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
    is_by_name,
)

EVAL_LOSS = "eval_loss"
"""The metric of a run that the record has a table for: a loss on held-out samples."""
FIRST_GENERATION = Generation(1, 1)
"""First generation of an attached run; n grows each time that its program goes back to an earlier step."""


def view_of(request: AttachRun, node: str, directory: str, generation: Generation, step: int) -> RunView:
    """The run as its program describes it. No verb is taken: the loop is the program's own."""
    ranks = tuple(
        RankView(
            rank=rank.rank,
            node=rank.node or node,
            state="run",
            since_at=request.started_at,
            share=None,
            micro_batch=rank.micro_batch,
            backend=rank.backend,
            device=rank.device,
            pid=rank.pid,
        )
        for rank in sorted(request.ranks, key=lambda rank: rank.rank)
    )
    return RunView(
        run=request.run,
        name=request.name,
        state="running",
        lead=node,
        engine="",
        generation=generation,
        step=step,
        steps=request.steps,
        plan_version=0,
        global_batch=None,
        samples=None,
        cursor=None,
        learning_rate=None,
        started_at=request.started_at,
        ranks=ranks,
        directory=directory,
        kind=request.kind,
        weight_unit=request.weight_unit,
        loss_unit=request.loss_unit,
    )


def going_on(view: RunView, before: RunView | None) -> RunView:
    """The view of a run that is attached again, with what its steps so far have said."""
    if before is None:
        return view
    evaluated = (before.eval_loss, before.eval_step) if (before.eval_step or 0) <= view.step else (None, None)
    return msgspec.structs.replace(
        view,
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
    step = StepCommitted(
        run=view.run,
        generation=view.generation,
        step=made.step,
        committed_at=made.committed_at,
        loss=made.loss,
        weight=made.weight,
        samples=made.samples,
        learning_rate=made.learning_rate,
        grad_norm=made.grad_norm,
        cursor=None,
        global_batch=made.global_batch,
        plan_version=0,
        step_seconds=made.step_seconds,
        tokens=made.tokens,
        tokens_total=(before.tokens_total if before else 0.0) + (made.tokens or 0),
        weight_total=_sum(before.weight_total if before else None, made.weight),
        seconds_total=((before.seconds_total if before else None) or 0.0) + made.step_seconds,
        values=made.values,
    )
    parts = tuple(
        RankStep(
            run=view.run,
            generation=view.generation,
            step=made.step,
            rank=part.rank,
            node=nodes.get(part.rank, view.lead),
            tokens=part.tokens,
            samples=part.samples,
            micro_batch=part.micro_batch,
            replays=0,
            step_seconds=part.step_seconds,
            phases=part.phases,
            weight=part.weight,
            values=part.values,
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
    """The view of a run whose program has been silent for `seconds`."""
    why = f"its program has been silent for {seconds:.0f} s"
    ranks = (msgspec.structs.replace(rank, state="lost", since_at=at, why=why) for rank in view.ranks)
    return msgspec.structs.replace(view, ranks=tuple(ranks))


def heard(view: RunView, at: float) -> RunView:
    """The view of a run whose program is heard again; itself if it was not silent."""
    if all(rank.state == "run" for rank in view.ranks):
        return view
    ranks = (msgspec.structs.replace(rank, state="run", since_at=at, why="") for rank in view.ranks)
    return msgspec.structs.replace(view, ranks=tuple(ranks))


def ended(view: RunView, state: RunState, reason: str, at: float) -> RunView:
    """The view of a run that is over."""
    rank_state: RankState = "failed" if state == "failed" else "done"
    ranks = (msgspec.structs.replace(rank, state=rank_state, since_at=at, why="") for rank in view.ranks)
    return msgspec.structs.replace(view, state=state, reason=reason, ranks=tuple(ranks))
