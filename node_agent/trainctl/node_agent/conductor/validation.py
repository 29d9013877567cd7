"""Invariants of a conductor's state after every event. Tests check them, production doesn't."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterator
from math import inf

from trainctl.node_agent.conductor.events import CommandEnded, Decision, Happened, Issue
from trainctl.node_agent.conductor.stages import Stage
from trainctl.node_agent.conductor.state import SIDE_KINDS, ConductorState
from trainctl.node_agent.planning.durable import Writing
from trainctl.protocol.messages import Generation, StepPlan
from trainctl.protocol.messages.events import CheckpointWritten


class BrokenPromiseError(Exception):
    """A conductor's state is one that must not be; the text is what is wrong with it."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """Values after one event that only ever grow, and the checkpoint that is being written."""

    stage: Stage = "loading"
    generation: Generation = Generation(0, 0)  # noqa: RUF009  immutable
    seq: int = 0
    plan_version: int = 0
    writing: Writing | None = None


def validate(state: ConductorState, decisions: list[Decision], before: Mark) -> Mark:
    """Return the mark of a state, for the next event; `decisions`: those of this event. Raises
    BrokenPromiseError with all promises that it breaks."""
    durable = state.durable
    mark = Mark(state.stage, durable.generation, durable.seq, durable.settings.plan_version, durable.writing)
    broken = [
        *_shares(state),
        *_ranks(state),
        *_commands(state, decisions),
        *_checkpoints(state),
        *_copies(state, decisions, before),
        *_growth(before, mark),
    ]
    if state.stage not in ("leaving", "over"):
        broken += _plans(state)
    issued = [decision for decision in decisions if isinstance(decision, Issue)]
    broken += [each for decision in issued for each in _issued(decision.plan, decision, state)]
    if broken:
        raise BrokenPromiseError(f"{state.stage} at step {state.progress.step}: {'; '.join(broken)}")
    return mark


def _shares(state: ConductorState) -> Iterator[str]:
    """The global batch is dealt to the live ranks, and to no one else."""
    settings = state.settings
    if sum(settings.shares.values()) != settings.global_batch:
        yield f"shares {dict(settings.shares)} don't sum to {settings.global_batch}"
    for rank, setting in settings.ranks.items():
        if bool(setting.share) == bool(setting.out):
            yield f"rank {rank} has {setting.share} samples and is {setting.out or 'live'}"
        if setting.micro_batch < 1:
            yield f"rank {rank} has a micro-batch of {setting.micro_batch}"
    if not settings.live:
        yield "no rank is live"


def _ranks(state: ConductorState) -> Iterator[str]:
    """Members are known, those that stand hold the group's generation, and a stage asks for what it waits for."""
    durable, stage = state.durable, state.stage
    if not {*durable.members, *durable.departed, *(durable.probed or ())} <= state.ranks.keys():
        yield "members, departed or probed ranks are not of this run"
    if any(durable.settings.ranks[rank].out in ("", "failed") for rank in durable.departed):
        yield "a rank that departed is live or given up"
    if (state.due < inf) != (stage in ("fencing", "offering", "forming")):
        yield f"answers are due at {state.due}"
    if (state.final is not None) != (stage in ("leaving", "over")):
        yield f"the run's end is {state.final}"
    if stage in ("fencing", "offering", "forming") and not state.awaited:
        yield "no answer is waited for"
    if stage == "offering" and state.engine == "none":
        yield "endpoints are asked for that no engine needs"
    if stage != "formed":
        return
    if durable.mode != "paused" and not state.is_current:
        yield f"members {sorted(state.members)} are not the live ranks {[*state.live]}"
    if any(state.ranks[rank].ready is None and state.settings.ranks[rank].out == "" for rank in state.members):
        yield "a member has not loaded"
    if state.engine == "none" and len(state.members) > 1:
        yield "several members have no engine"


def _commands(state: ConductorState, decisions: list[Decision]) -> Iterator[str]:
    """A command is in one place until its outcome, and a mode belongs to the commands that wait for it."""
    pending, durable = state.pending, state.durable
    places = Counter([command.id for command in pending.waiting] + [*durable.carried])
    if twice := [id for id, count in places.items() if count > 1]:
        yield f"commands in two places: {twice}"
    ended = [each.id for each in decisions if isinstance(each, CommandEnded) and each.id in places]
    if ended:
        yield f"commands that ended still wait: {ended}"
    if pending.pausing and not pending.wants_pause:
        yield "a pause waits that is not wanted"
    if durable.mode == "paused" and not pending.wants_pause:
        yield "the run is paused and goes on"
    if pending.stopping and durable.mode != "stopping":
        yield "a stop waits in a run that doesn't stop"
    for id, carried in durable.carried.items():
        if carried.step > state.progress.step + 3:  # two are planned ahead, and a fence may undo one more
            yield f"command {id} is carried by step {carried.step}, and {state.progress.step} is committed"
        if state.stage != "formed":
            continue
        if carried.verb in SIDE_KINDS:
            plans = [in_flight.plan for in_flight in state.in_flight.values()]
            writing = durable.writing.commands if durable.writing is not None else ()
            if not (any(id in plan.commands for plan in plans) or id in writing):
                yield f"no plan answers command {id}"
        elif carried.step <= state.progress.step:
            yield f"command {id} has no outcome though step {carried.step} is committed"


def _plans(state: ConductorState) -> Iterator[str]:
    """One plan ahead, of this generation and its members, and every step once, from where the last one ended."""
    progress, durable = state.progress, state.durable
    plans = [*state.in_flight.values()]
    if plans and state.stage != "formed":
        yield "plans are in flight without a group"
    if len(plans) > 2 or (len(plans) == 2 and not (plans[0].plan.kind == "train" and plans[0].soon >= plans[0].ranks)):
        yield f"{len(plans)} plans are in flight"
    for seq, in_flight in state.in_flight.items():
        plan = in_flight.plan
        if plan.seq != seq or seq > durable.seq or plan.generation != durable.generation:
            yield f"plan {seq} of {plan.generation} is in flight in {durable.generation}"
        if not in_flight.ranks <= state.members:
            yield f"plan {seq} is of ranks {sorted(in_flight.ranks)}, not all members"
        if not in_flight.soon | in_flight.reports.keys() <= in_flight.ranks or in_flight.is_done:
            yield f"plan {seq} is answered by {sorted(in_flight.reports)}"
    step, cursor = progress.step, progress.cursor
    for plan in (in_flight.plan for in_flight in plans if in_flight.plan.kind == "train" and not in_flight.reports):
        if (plan.step, plan.cursor) != (step + 1, cursor):
            yield f"step {plan.step} from {plan.cursor} on is planned after step {step} up to {cursor}"
        step, cursor = plan.step, plan.cursor + plan.global_batch
    if state.stage == "formed" and (step, cursor) != (state.planned_step, state.planned_cursor):
        yield f"step {state.planned_step} up to {state.planned_cursor} counts as planned, not {step} up to {cursor}"


def _issued(plan: StepPlan, decision: Issue, state: ConductorState) -> Iterator[str]:
    """A plan deals each position of its batch once, and only to members; an evaluation has samples."""
    ranks = [work.rank for work in plan.work]
    if not ranks or len({*ranks}) < len(ranks) or not (decision.held or state.members.issuperset(ranks)):
        yield f"plan {plan.seq} is of ranks {ranks}"
    if plan.kind == "evaluate" and not any(work.ranges for work in plan.work):
        yield f"plan {plan.seq} evaluates nothing"
    if plan.kind != "train":
        return
    pieces = sorted(piece for work in plan.work for piece in work.ranges)
    start, stop = plan.cursor, plan.cursor + plan.global_batch
    overlap = any(piece.stop > after.start for piece, after in itertools.pairwise(pieces))
    dealt = sum(piece.count for piece in pieces)
    outside = bool(pieces) and not start <= pieces[0].start <= pieces[-1].stop <= stop
    if overlap or outside or (plan.finishes is None and dealt != plan.global_batch):
        yield f"plan {plan.seq} deals {dealt} of {plan.global_batch} positions from {start} on as {pieces}"


def _checkpoints(state: ConductorState) -> Iterator[str]:
    """Checkpoints are of committed steps, and one is written at a time, by ranks of this run."""
    durable, step = state.durable, state.progress.step
    if [*durable.checkpoints] != sorted({*durable.checkpoints}) or durable.written > max(step, durable.first_step):
        yield f"checkpoints {durable.checkpoints}, the newest of step {durable.written}, after step {step}"
    if durable.writing is not None and not {*durable.writing.ranks} <= state.ranks.keys():
        yield f"ranks {durable.writing.ranks} write a checkpoint"
    if durable.writing is not None and durable.writing.step > step:
        yield f"a checkpoint of step {durable.writing.step} is written after step {step}"


def _copies(state: ConductorState, decisions: list[Decision], before: Mark) -> Iterator[str]:
    """A checkpoint that its copier doesn't write, though another rank does, is written again."""
    writing, pending = before.writing, state.pending
    if writing is None or writing.copier is None or state.durable.writing is not None or state.final is not None:
        return
    happened = [each for each in decisions if isinstance(each, Happened) and isinstance(each.data, CheckpointWritten)]
    is_written = writing.written or bool(happened)
    is_copied = any(each.by == state.node(writing.copier) for each in happened)
    plans = [in_flight.plan.kind for in_flight in state.in_flight.values()]
    is_planned = "checkpoint" in {*plans, *pending.scheduled} or bool(pending.side["checkpoint"])
    if is_written and not (is_copied or is_planned):
        yield f"rank {writing.copier} has not written the checkpoint that it was to copy, and none is planned"


def _growth(before: Mark, mark: Mark) -> Iterator[str]:
    """Generations, plans and settings only ever grow; a new group is a new generation."""
    if mark.generation < before.generation or mark.seq < before.seq or mark.plan_version < before.plan_version:
        yield f"{mark} follows {before}"
    is_new = mark.stage in ("fencing", "offering") and before.stage not in ("loading", mark.stage)
    if is_new and mark.generation <= before.generation:
        yield f"{mark.stage} in generation {mark.generation} as before"
