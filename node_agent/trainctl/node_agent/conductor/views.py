"""Views of a run for clients, made from its conductor."""

import msgspec

from trainctl.node_agent.autopilot.policy import mode_of
from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.policies import POLICIES
from trainctl.protocol.messages import PolicyView, RankState, RankView, RunCost, RunView


def run_view(
    conductor: Conductor, started_at: float, directory: str, ranks: tuple[RankView, ...], lead: str,
    cost: RunCost | None = None,
) -> RunView:  # fmt: skip
    """The whole view. `lead`: the node that leads; `cost`: of the run so far."""
    objective = objective_of(conductor.config.objective, conductor.config.data.kind)
    config, durable, settings = conductor.config, conductor.durable, conductor.durable.settings
    return RunView(
        run=conductor.run, name=config.run.name, state=conductor.state, lead=lead, engine=conductor.engine,
        generation=durable.generation, step=conductor.progress.step, steps=config.run.steps,
        plan_version=settings.plan_version, global_batch=settings.global_batch,
        samples=conductor.samples,
        cursor=conductor.progress.cursor, learning_rate=conductor.learning_rate, started_at=started_at, ranks=ranks,
        directory=directory, eval_loss=durable.eval_loss, eval_step=durable.eval_step,
        eval_values=tuple(durable.eval_values.items()), reason=conductor.reason,
        mixed=conductor.is_mixed, verbs=tuple(conductor.not_taken.items()),
        skipped=tuple((skip.start, skip.count) for skip in durable.skipped),
        policies=tuple(PolicyView(name, mode_of(config, durable, name)) for name in POLICIES),
        weight_unit=objective.weight_unit, loss_unit=objective.loss_unit, cost=cost,
        branch=durable.branch,
    )  # fmt: skip


def rank_view(
    conductor: Conductor, rank: int, pid: int | None, away: str, before: RankView | None, at: float
) -> RankView:
    """One rank; `away`: where it was when it fell silent, else empty. `since_at` stays while the state does."""
    setting, ready = conductor.durable.settings.ranks[rank], conductor.ranks[rank].ready
    state = _rank_state(conductor, rank, away)
    since_at = before.since_at if before is not None and before.state == state else at
    return RankView(
        rank=rank, node=setting.node, state=state, since_at=since_at, share=setting.share,
        micro_batch=setting.micro_in_force, why=_why(conductor, rank, state, away),
        backend=ready.backend if ready else None, device=ready.device if ready else None, pid=pid,
        compute=ready.compute if ready else None, passes=_passes(conductor, rank), micro_set=setting.micro_batch,
        micro_most=conductor.most_micro(rank) if setting.auto_micro else None, machine=ready.machine if ready else "",
        cores=ready.cores if ready else 0.0,
    )  # fmt: skip


def _passes(conductor: Conductor, rank: int) -> tuple[tuple[int, float], ...]:
    """The points of a rank's curve, not rounded: of two equal splits, clients choose the same one as the lead."""
    curve = conductor.curve(rank)
    return curve.points if curve is not None else ()


def same_but_progress(one: RunView, other: RunView) -> bool:
    """Whether two views differ by no more than a committed step makes them."""

    def still(view: RunView) -> RunView:
        return msgspec.structs.replace(view, step=0, cursor=0, learning_rate=0.0, boot="", seq=0)

    return still(one) == still(other)


def _rank_state(conductor: Conductor, rank: int, away: str) -> RankState:
    at, out = conductor.ranks[rank], conductor.durable.settings.ranks[rank].out
    if out == "failed" and conductor.final is None:
        return "failed"
    if rank in conductor.durable.departed and conductor.final is None:
        return "drained"
    if at.ended and out and conductor.final is None:
        return "lost"
    if at.ended and conductor.final is None and conductor.stage == "loading":
        return "starting"  # another is started in a while
    if at.ended and conductor.goes_back_by_command:
        return "starting"
    if at.ended:
        return "failed" if conductor.final == "failed" else "done"
    if out == "lost":
        return "rejoining" if at.ready is not None or conductor.is_starting(rank) else "lost"
    if at.ready is None:
        return "starting"
    if away or rank in conductor.hangs.hung:
        return "hung"
    if out:
        return "drained"
    if conductor.draining(rank):
        return "draining"
    if conductor.state == "paused":
        return "paused"
    if rank in conductor.hangs.late:
        return "late"
    return "run" if conductor.stage == "formed" else "ready"


def _why(conductor: Conductor, rank: int, state: RankState, away: str) -> str:
    out = conductor.durable.settings.ranks[rank].out
    if state == "lost" and out == "drained":
        return f"drained; its trainer {conductor.ranks[rank].why}"
    if out in ("lost", "failed") and conductor.final is None:
        return conductor.ranks[rank].why or away
    match state:
        case "hung":
            return (away or conductor.hangs.hung[rank]) + conductor.hangs.waited_for(rank)
        case "late":
            return conductor.hangs.late[rank]
        case "draining":
            return conductor.draining(rank)
        case "failed":
            return conductor.reason
        case "starting" if conductor.goes_back_by_command:
            return conductor.reason
        case "starting":
            return conductor.ranks[rank].why if conductor.ranks[rank].ended else conductor.ranks[rank].loading
        case "run" if rank in conductor.hangs.compiling:
            return "compiling: the first time in a process takes longer"
        case "ready" | "run" | "paused" | "lost" | "rejoining" | "drained" | "done":
            return conductor.writing(rank)
