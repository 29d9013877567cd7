"""Views of a run for clients, made from the parts of its conductor, and dry runs of commands: a copy of the conductor
takes the command, so the same code judges it, and nothing changes."""

import copy
import math
from collections.abc import Mapping

import msgspec

from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.events import Commanded, CommandEnded
from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import RankSetting, Settings
from trainctl.node_agent.planning.plans import rate
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.policies import POLICIES
from trainctl.protocol.messages import (
    DryRun,
    DryRunRequest,
    PolicyView,
    RankForecast,
    RankState,
    RankView,
    RunCost,
    RunView,
    verbs,
)
from trainctl.protocol.messages.event_prose import result

_DRY_RUN = "dry-run"
"""ID of the command of a dry run."""


def run_view(
    conductor: Conductor,
    started_at: float,
    directory: str,
    ranks: tuple[RankView, ...],
    lead: str,
    cost: RunCost | None = None,
) -> RunView:
    """Return the whole view. `lead`: the node that leads; `cost`: of the run so far."""
    config, durable, progress = conductor.config, conductor.durable, conductor.progress
    objective = objective_of(config.objective, config.data.kind)
    live, ready = conductor.shared.live.values(), [at.ready for at in conductor.ranks.values() if at.ready is not None]
    sealed = conductor.pipeline.data.samples
    next_step = min(progress.step + 1, config.run.steps)
    return RunView(
        run=conductor.run,
        name=config.run.name,
        state=conductor.state,
        lead=lead,
        engine=conductor.shared.engine,
        generation=durable.generation,
        step=progress.step,
        steps=config.run.steps,
        plan_version=durable.settings.plan_version,
        global_batch=durable.settings.global_batch,
        samples=next((each.samples for each in ready), None) if sealed is None else sealed,
        cursor=progress.cursor,
        learning_rate=rate(durable.settings.lr, config.optimizer, config.run.steps, next_step),
        started_at=started_at,
        ranks=ranks,
        directory=directory,
        eval_loss=durable.eval_loss,
        eval_step=durable.eval_step,
        eval_values=tuple(durable.eval_values.items()),
        reason=conductor.reason,
        mixed=len({at.ready.backend for at in live if at.ready is not None}) > 1,
        verbs=tuple(conductor.commands.not_taken.items()),
        skipped=tuple((skip.start, skip.count) for skip in durable.skipped),
        policies=tuple(PolicyView(name, conductor.proposals.mode(name)) for name in POLICIES),
        weight_unit=objective.weight_unit,
        loss_unit=objective.loss_unit,
        cost=cost,
        branch=durable.branch,
    )


def rank_view(
    conductor: Conductor, rank: int, pid: int | None, away: str, before: RankView | None, at: float
) -> RankView:
    """Return one rank's; `away`: where it was when it fell silent, else empty. `since_at` stays while the state
    does."""
    setting, ready = conductor.durable.settings.ranks[rank], conductor.ranks[rank].ready
    state = _rank_state(conductor, rank, away)
    curve = conductor.pipeline.rates.curve(rank)
    return RankView(
        rank=rank,
        node=setting.node,
        state=state,
        since_at=before.since_at if before is not None and before.state == state else at,
        share=setting.share,
        micro_batch=setting.micro_in_force,
        why=_why(conductor, rank, state, away),
        backend=ready.backend if ready else None,
        device=ready.device if ready else None,
        pid=pid,
        compute=ready.compute if ready else None,
        passes=curve.points if curve is not None else (),  # not rounded: clients choose the same split as the lead
        micro_set=setting.micro_batch,
        micro_most=conductor.pipeline.most_micro((rank,)).get(rank) if setting.auto_micro else None,
        machine=ready.machine if ready else "",
        cores=ready.cores if ready else 0.0,
    )


def same_but_progress(one: RunView, other: RunView) -> bool:
    """Return whether two views differ by no more than a committed step makes them."""

    def without_progress(view: RunView) -> RunView:
        return msgspec.structs.replace(view, step=0, cursor=0, learning_rate=0.0, boot="", seq=0)

    return without_progress(one) == without_progress(other)


def _rank_state(conductor: Conductor, rank: int, away: str) -> RankState:
    at, out, final = conductor.ranks[rank], conductor.durable.settings.ranks[rank].out, conductor.final
    if final is None and out == "failed":
        return "failed"
    if final is None and rank in conductor.durable.departed:
        return "drained"
    if final is None and at.ended and (out or conductor.stage == "loading"):
        return "lost" if out else "starting"  # another is started in a while
    if at.ended and _rolls_back(conductor):
        return "starting"
    if at.ended:
        return "failed" if final == "failed" else "done"
    if out == "lost":
        return "rejoining" if at.ready is not None or conductor.restarts.is_starting(rank) else "lost"
    if at.ready is None:
        return "starting"
    if away or rank in conductor.hangs.hung:
        return "hung"
    if out:
        return "drained"
    if _draining(conductor, rank):
        return "draining"
    if conductor.state == "paused":
        return "paused"
    if rank in conductor.hangs.late:
        return "late"
    return "run" if conductor.stage == "formed" else "ready"


def _rolls_back(conductor: Conductor) -> bool:
    """Return whether the run goes back by a command: no rank has failed."""
    return conductor.goes_back and conductor.durable.rollback is not None


def _draining(conductor: Conductor, rank: int) -> str:
    """Until when the group has a rank of a node whose drain was accepted; empty if there is no such drain."""
    node, staged = conductor.shared.node(rank), conductor.shared.pending.staged
    drains = any(isinstance(command.args, verbs.Drain) and command.node == node for command in staged)
    return conductor.deadlines.end_of_part if drains or rank in conductor.departures.due else ""


def _why(conductor: Conductor, rank: int, state: RankState, away: str) -> str:
    at, out = conductor.ranks[rank], conductor.durable.settings.ranks[rank].out
    if state == "lost" and out == "drained":
        return f"drained; its trainer {at.why}"
    if out in ("lost", "failed") and conductor.final is None:
        return at.why or away
    match state:
        case "hung":
            return (away or conductor.hangs.hung[rank]) + conductor.hangs.waited_for(rank)
        case "late":
            return conductor.hangs.late[rank]
        case "draining":
            return _draining(conductor, rank)
        case "failed":
            return conductor.reason
        case "starting" if _rolls_back(conductor):
            return conductor.reason
        case "starting":
            return at.why if at.ended else at.loading
        case "run" if rank in conductor.hangs.compiling:
            return "compiling: the first time in a process takes longer"
        case "ready" | "run" | "paused" | "lost" | "rejoining" | "drained" | "done":
            return conductor.writes.doing(rank)


def dry_run(conductor: Conductor, request: DryRunRequest, now: float) -> DryRun:
    """Return what a command about the plan would do at `now` (seconds of the conductor's clock). Raises
    InvalidInputError for arguments that no run takes."""
    args = verbs.check(request.verb, request.args, request.node)
    trial = copy.deepcopy(conductor)
    trial.shared.now = now
    facts, modes = trial.pipeline.facts(), {name: trial.proposals.mode(name) for name in POLICIES}
    before, first_step = trial.shared.folded(facts), trial.shared.planned_step + 1
    command = Commanded(_DRY_RUN, request.verb, args, "", request.node, request.if_plan, math.inf)
    outcomes = [each for each in trial.handle(command, now) if isinstance(each, CommandEnded) and each.id == _DRY_RUN]
    said = DryRun(request.rid, conductor.run, request.verb, plan_version=before.plan_version)
    if outcomes and outcomes[0].state != "applied":
        return msgspec.structs.replace(said, refused=outcomes[0].reason, field=outcomes[0].field)
    taken = outcomes[0] if outcomes else trial.durable.carried.get(_DRY_RUN)
    step, made = (taken.step, taken.made) if taken is not None else (first_step, None)
    if made is None and isinstance(args, verbs.EditArgs):
        made = edits.apply(before, args, request.node, first_step, trial.config, facts).change
    words_before, words_after = result(made) if made is not None else (None, None)
    after, steps = trial.shared.folded(trial.pipeline.facts()), trial.config.run.steps
    models, changed = (
        trial.pipeline.rates.of(trial.shared.ranks),
        [rank for rank in after.ranks if before.ranks[rank] != after.ranks[rank]],
    )
    return msgspec.structs.replace(
        said,
        step=step,
        before=words_before,
        after=words_after,
        learning_rate=rate(after.lr, trial.config.optimizer, steps, min(max(step or 1, 1), steps)),
        global_batch=after.global_batch,
        step_seconds_before=_step_seconds(before, before, models),
        step_seconds=_step_seconds(before, after, models),
        ranks=tuple(_forecast(trial, rank, before, after, models.get(rank)) for rank in changed),
        advising=tuple(name for name, mode in modes.items() if mode == "on" and trial.proposals.mode(name) == "advise"),
    )


def _forecast(trial: Conductor, rank: int, before: Settings, after: Settings, model: StepModel | None) -> RankForecast:
    old, new = before.live.get(rank), after.live.get(rank)
    memory = trial.pipeline.peaks.predicted(rank, new.micro_in_force) if new is not None else None
    return RankForecast(
        rank=rank,
        node=after.ranks[rank].node,
        share_before=old.share if old is not None else None,
        share=new.share if new is not None else None,
        micro_before=old.micro_in_force if old is not None else None,
        micro=new.micro_in_force if new is not None else None,
        seconds=_seconds(old, new, model) if new is not None else None,
        memory_bytes=memory.bytes if memory is not None else None,
        memory_is_bound=memory is not None and memory.is_bound,
        memory_cap_bytes=memory.cap_bytes if memory is not None else None,
    )


def _step_seconds(before: Settings, after: Settings, models: Mapping[int, StepModel]) -> float | None:
    """Return the slowest rank's seconds; None if one of them isn't known."""
    seconds = [_seconds(before.live.get(rank), new, models.get(rank)) for rank, new in after.live.items()]
    known = [each for each in seconds if each is not None]
    return max(known) if len(known) == len(seconds) else None


def _seconds(old: RankSetting | None, new: RankSetting, model: StepModel | None) -> float | None:
    """Return a rank's seconds of a step; None where another micro-batch is set, and what it takes isn't measured."""
    is_same_size = old is not None and min(new.share, old.micro_batch) == min(new.share, new.micro_batch)
    if model is None or (model.is_linear and not is_same_size):
        return None
    return model.seconds(new.share, new.micro_batch)
