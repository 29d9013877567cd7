"""A dry run of a command: a copy of the conductor takes it, so the same code judges it, and nothing changes."""

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from trainctl.node_agent.conductor.conductor import Conductor
from trainctl.node_agent.conductor.events import Commanded, CommandEnded
from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import RankSetting, Settings
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.config.policies import POLICIES, PolicyMode, PolicyName
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import DryRun, DryRunRequest, RankForecast, verbs
from trainctl.protocol.messages.event_prose import result
from trainctl.protocol.messages.events import AnyEvent

_ID = "dry-run"


def dry_run(conductor: Conductor, request: DryRunRequest, now: float) -> DryRun:
    """Return what a command would do at `now` (seconds of the conductor's clock). Raises InvalidInputError for
    arguments that no run takes."""
    args = verbs.check(request.verb, request.args, request.node)
    if isinstance(args, verbs.AgentArgs):
        raise InvalidInputError("verb", f"{request.verb} has no dry run: it isn't about the plan of a run")
    command = Commanded(_ID, request.verb, args, "", request.node, request.if_plan, math.inf)
    trial = copy.deepcopy(conductor)
    trial.shared.now = now
    before, facts = trial.shared.folded(trial.pipeline.facts()), trial.pipeline.facts()
    modes = {name: trial.proposals.mode(name) for name in POLICIES}
    first_step = trial.shared.planned_step + 1
    ended = next((one for one in trial.handle(command, now) if isinstance(one, CommandEnded) and one.id == _ID), None)
    fields: dict[str, Any] = {"rid": request.rid, "run": conductor.run, "verb": request.verb}
    if ended is not None and ended.state != "applied":
        return DryRun(**fields, refused=ended.reason, field=ended.field, plan_version=before.plan_version)
    carried = trial.durable.carried.get(_ID)
    step = ended.step if ended is not None else carried.step if carried is not None else first_step
    made = ended.made if ended is not None else carried.made if carried is not None else None
    if made is None and isinstance(args, verbs.EditArgs):
        facts = dataclasses.replace(facts, by_person=True)
        made = edits.apply(before, args, request.node, first_step, trial.config, facts).change
    after = trial.shared.folded(trial.pipeline.facts())
    return _forecast(trial, before, after, fields, made, step, modes)


def _forecast(
    trial: Conductor,
    before: Settings,
    after: Settings,
    fields: Mapping[str, Any],
    made: AnyEvent | None,
    step: int | None,
    modes: Mapping[PolicyName, PolicyMode],
) -> DryRun:
    steps = trial.config.run.steps
    models = trial.pipeline.rates.of(trial.shared.ranks)
    words_before, words_after = result(made) if made is not None else (None, None)
    return DryRun(
        **fields,
        step=step,
        before=words_before,
        after=words_after,
        plan_version=before.plan_version,
        learning_rate=rate(after.lr, trial.config.optimizer, steps, min(max(step or 1, 1), steps)),
        global_batch=after.global_batch,
        step_seconds_before=_step_seconds(before, before, models),
        step_seconds=_step_seconds(before, after, models),
        ranks=tuple(
            _rank(trial, rank, before, after, models.get(rank))
            for rank in after.ranks
            if before.ranks[rank] != after.ranks[rank]
        ),
        advising=tuple(name for name, mode in modes.items() if mode == "on" and trial.proposals.mode(name) == "advise"),
    )


def _rank(trial: Conductor, rank: int, before: Settings, after: Settings, model: StepModel | None) -> RankForecast:
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
    found = [_seconds(before.live.get(rank), new, models.get(rank)) for rank, new in after.live.items()]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) if known and len(known) == len(found) else None


def _seconds(old: RankSetting | None, new: RankSetting, model: StepModel | None) -> float | None:
    """Return a rank's seconds of a step; None where another micro-batch is set, and what it takes isn't measured."""
    is_same_size = old is not None and min(new.share, old.micro_batch) == min(new.share, new.micro_batch)
    if model is None or (model.is_linear and not is_same_size):
        return None
    return model.seconds(new.share, new.micro_batch)
