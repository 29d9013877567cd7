"""State of a conductor: its clock, its stage, the ranks, the plans in flight, the commands that wait, and what was
committed. Its parts share it, and no one else writes to it."""

import contextlib
import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any, Literal, get_args

import msgspec

from trainctl.node_agent.conductor.events import Commanded, CommandEnded, CommandOutcome, Decision, Happened, Persist
from trainctl.node_agent.conductor.stages import TRANSITIONS, Rank, Stage
from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import Carried, Durable, Settings
from trainctl.node_agent.planning.share_edits import Facts
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    METRICS,
    Fenced,
    RankStep,
    Ready,
    Report,
    Severity,
    StepCommitted,
    StepPlan,
    verbs,
)
from trainctl.protocol.messages.events import AnyEvent

EXPIRED = "no step could apply the command in time"
SideKind = Literal["probe", "measure", "sync", "evaluate", "sample", "defragment", "profile", "checkpoint"]
SIDE_KINDS: tuple[SideKind, ...] = get_args(SideKind)
"""Plans beside training: they don't move the cursor. In the order in which one boundary runs them, so that what is
evaluated and written is the state that all ranks have been given."""
Final = Literal["finished", "stopped", "failed"]


class CannotGoOnError(Exception):
    """The run fails; the text is why, in one line."""


class NobodyLeftError(CannotGoOnError):
    """No rank has the state of the record's last step: the run may continue from a checkpoint."""


@dataclasses.dataclass(eq=False)
class PlanInFlight:
    """A plan that not all of its ranks have reported."""

    plan: StepPlan
    since: float  # its ranks are at it: it was issued, or the one before it was done
    soon: set[int] = dataclasses.field(default_factory=set)
    reports: dict[int, Report] = dataclasses.field(default_factory=dict)
    summing_since: float | None = None  # all its ranks are in the same sum since then
    is_slow: bool = False  # an event has said that it takes longer than expected
    is_done: bool = False  # all its ranks have reported

    def __post_init__(self) -> None:
        self.ranks = {work.rank for work in self.plan.work}

    def at_own_part(self, *, alone: bool) -> set[int]:
        """The ranks that wait for no one and are not done; of a step, one of several has done its part at the sum."""
        done = self.soon if self.plan.kind == "train" and not alone else set(self.reports)
        return self.ranks - done


class Pending:
    """Accepted commands that wait for the step, the boundary or the mode that ends them."""

    def __init__(self) -> None:
        self.staged: list[Commanded] = []  # edits that the next train plan takes up
        self.side: dict[str, list[Commanded]] = {kind: [] for kind in SIDE_KINDS}
        self.scheduled: set[str] = set()  # side plans that the run file wants at this boundary
        self.pausing: list[Commanded] = []
        self.stopping: list[Commanded] = []
        self.wants_pause = False  # a pause was asked for, and is or will be entered

    def next_side(self, held: Collection[str] = ()) -> SideKind | None:
        """The kind of side plan that is due first, if any; none that is `held` back."""
        if not self.scheduled and not any(self.side.values()):
            return None
        due = (kind for kind in SIDE_KINDS if kind in self.scheduled or self.side[kind])
        return next((kind for kind in due if kind not in held), None)

    def take_side(self, kind: SideKind) -> list[Commanded]:
        """The commands that a side plan answers; whatever wanted that plan is satisfied by it. Each command to sample
        or to profile has a plan of its own."""
        if kind in ("sample", "profile") and self.side[kind]:
            return [self.side[kind].pop(0)]
        self.scheduled.discard(kind)
        taken, self.side[kind] = self.side[kind], []
        return taken

    @property
    def waiting(self) -> list[Commanded]:
        """Everything that waits."""
        return [command for queue in self._queues for command in queue] + self.stopping

    @property
    def _queues(self) -> list[list[Commanded]]:
        """Queues whose commands can expire; a stop doesn't."""
        return [self.staged, *self.side.values(), self.pausing]

    def take(self, until: float = math.inf) -> list[Commanded]:
        """Hand out and forget what has expired `until` then; by default everything."""
        taken = [command for queue in self._queues for command in queue if command.expires <= until]
        for queue in self._queues:
            queue[:] = [command for command in queue if command.expires > until]
        if until == math.inf:
            taken, self.stopping = taken + self.stopping, []
        return taken


_OF_RUN = frozenset(name for name, metric in METRICS.items() if metric.scope == "run")
"""Values that go to the run's row of a step."""
_OF_OTHERS = frozenset(name for name, metric in METRICS.items() if metric.scope != "rank")
"""Values that don't go to a rank's row of a step; one that no table knows does."""


class RunSums(msgspec.Struct, frozen=True):
    """Sums over all committed steps of a run."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, report: Report) -> "RunSums":
        """Return the sums with the step that a report commits."""
        return RunSums(
            self.weight + report.weight, self.tokens + report.tokens, self.seconds + max(report.step_seconds, 0.0)
        )


@dataclasses.dataclass
class Progress:
    """Progress that was committed: the last step, the first position after it, and sums over all steps."""

    step: int = 0
    cursor: int = 0
    totals: RunSums = RunSums()  # noqa: RUF009  immutable
    before: RunSums = RunSums()  # noqa: RUF009  immutable; without the last step
    loss: float | None = None  # of the last step

    def commit(self, plan: StepPlan, report: Report) -> StepCommitted:
        """Move on to the step of `plan`, which `report` commits. Return the run's row of it."""
        self.step, self.cursor = report.step, plan.cursor + plan.global_batch
        self.before, self.totals = self.totals, self.totals.after(report)
        self.loss = report.loss_sum / report.weight if report.weight else math.nan
        return StepCommitted(
            run=report.run,
            generation=report.generation,
            step=report.step,
            committed_at=report.finished_at,
            loss=self.loss,
            weight=report.weight,
            samples=plan.global_batch,
            learning_rate=plan.learning_rate,
            grad_norm=report.grad_norm,
            cursor=self.cursor,
            global_batch=plan.global_batch,
            plan_version=plan.plan_version,
            step_seconds=report.step_seconds,
            tokens=report.tokens,
            weight_total=self.totals.weight,
            tokens_total=self.totals.tokens,
            seconds_total=self.totals.seconds,
            skipped=report.skipped,
            values={name: value for name, value in report.values.items() if name in _OF_RUN},
        )


def rank_step(report: Report, node: str) -> RankStep:
    """One rank's row of the step it reports."""
    values = report.values
    if not _OF_OTHERS.isdisjoint(values):
        values = {name: value for name, value in values.items() if name not in _OF_OTHERS}
    return RankStep(
        run=report.run,
        generation=report.generation,
        step=report.step,
        rank=report.rank,
        node=node,
        tokens=report.own_tokens,
        samples=report.own_samples,
        micro_batch=report.micro_batch,
        replays=report.replays,
        step_seconds=report.step_seconds,
        phases=report.phases,
        weight=report.own_weight,
        values=values,
    )


class ConductorState:
    """Shared by the parts of one conductor."""

    def __init__(
        self, run: str, config: RunFile, durable: Durable, progress: Progress, *, adopts: bool = False
    ) -> None:
        """`adopts`: the trainers outlived another conductor, and stand in a generation of its."""
        self.run, self.config = run, config
        self.durable, self.progress, self.adopts = durable, progress, adopts
        self.now = 0.0  # seconds of a monotonic clock, at the event that is handled
        self.stage: Stage = "loading"
        self.due = math.inf  # when the answers to what the stage asks are overdue
        self.ranks = {rank: Rank() for rank in durable.settings.ranks}  # drained ones included
        self.engine: Literal["none", "gloo", "ring"] = "none"  # that the newest generation sums by
        self.failed_formations = 0  # formations in a row that failed, since the last step
        self.in_flight: dict[int, PlanInFlight] = {}  # by seq, oldest first
        self.planned_step, self.planned_cursor = progress.step, progress.cursor
        self.pending = Pending()
        self.pending.wants_pause = durable.mode == "paused"
        self.lacking = ""  # what is missing for steps to be made at all, empty if nothing
        self.waiting = ""  # for what data the next step is held back, empty if for none
        self.final: Final | None = None  # None until the run is to end
        self.reason = ""  # why it failed or goes back
        self.goes_back = False  # to a checkpoint, once its ranks are gone
        self._decisions: list[Decision] = []
        self.ends: list[CommandEnded] = []  # outcomes of commands among what has just been decided

    # ------------------------------------------------------------ ranks

    @property
    def settings(self) -> Settings:
        return self.durable.settings

    @property
    def is_ending(self) -> bool:
        """Return whether the run is to stop, or has done its last step and isn't paused there."""
        mode = self.durable.mode
        return mode == "stopping" or (mode == "running" and self.progress.step >= self.config.run.steps)

    @property
    def live(self) -> dict[int, Rank]:
        """The ranks that take part, ascending."""
        return {rank: self.ranks[rank] for rank in self.durable.settings.live}

    @property
    def members(self) -> frozenset[int]:
        """The ranks of the newest generation that was formed: they have the state of the last step."""
        return frozenset(self.durable.members)

    @property
    def is_current(self) -> bool:
        """Return whether the generation is one of the live ranks, no more and no less."""
        return self.members == self.durable.settings.live.keys()

    @property
    def awaited(self) -> list[int]:
        """The live ranks that have not answered what this stage asks of them, ascending."""
        return [rank for rank, at in self.live.items() if at.owes(self.stage)]

    @property
    def is_forming(self) -> bool:
        """Return whether a group forms, by answers that are overdue at some time."""
        return self.stage in ("offering", "forming")

    @property
    def ready(self) -> dict[int, Ready]:
        """Return what the ranks that live, drained ones included, said when they had loaded."""
        return {rank: at.ready for rank, at in self.ranks.items() if at.ready is not None and not at.ended}

    @property
    def any_ready(self) -> Ready:
        """Return what a live rank said when it had loaded; what all have in common is in it."""
        live = self.durable.settings.live
        return next(ready for rank in live if (ready := self.ranks[rank].ready) is not None)

    @property
    def parameters(self) -> int:
        """The number of trained parameters, 0 before a rank has loaded."""
        return next((ready.parameters for ready in self.ready.values()), 0)

    @property
    def returning(self) -> list[int]:
        """Lost ranks that are there again, ascending."""
        settings = self.durable.settings
        if len(settings.live) == len(settings.ranks):
            return []
        away = settings.ranks.keys() - settings.live.keys() - {*self.durable.departed}
        ready = self.ready
        return [rank for rank in sorted(away) if settings.ranks[rank].out == "lost" and rank in ready]

    @property
    def answers(self) -> list[Fenced]:
        """Return what the live ranks have answered to a fence."""
        return [at.fenced for at in self.live.values() if at.fenced is not None]

    def enter(self, stage: Stage, seconds: float = math.inf) -> None:
        """Change the stage: nothing else does. What it asks of the ranks is overdue after `seconds`. Raises ValueError
        for a stage that can't follow."""
        if stage not in TRANSITIONS[self.stage]:
            raise ValueError(f"a conductor can't go from {self.stage} to {stage}")
        self.stage = stage
        self.due = self.now + seconds

    def silent_seconds(self) -> dict[int, float]:
        """Return for how many seconds each rank that has ever said something has said nothing."""
        return {rank: self.now - at.heard for rank, at in self.ranks.items() if at.heard is not None}

    def node(self, rank: int) -> str:
        return self.durable.settings.ranks[rank].node

    def nodes(self, ranks: Iterable[int]) -> str:
        """The ranks' nodes as a list in words, each once."""
        return ", ".join(dict.fromkeys(self.node(rank) for rank in ranks))

    # ------------------------------------------------------------ decisions

    def take(self) -> list[Decision]:
        """Hand out what was decided since the last time, in order."""
        if not self._decisions:
            return []
        taken, self._decisions = self._decisions, []
        self.ends.clear()
        return taken

    def decide(self, decision: Decision) -> None:
        self._decisions.append(decision)

    def keep(self, **changes: Any) -> None:
        """Change the durable state; a Persist or Issue decision says when it is journaled."""
        self.durable = msgspec.structs.replace(self.durable, **changes)

    def persist(self, **changes: Any) -> None:
        """Change the durable state and have it journaled."""
        self.keep(**changes)
        self.decide(Persist(self.durable))

    def happen(
        self,
        data: AnyEvent,
        severity: Severity = "info",
        step: int | None = None,
        *,
        by: str = "auto",
        verb: str | None = None,
        command: str | None = None,
    ) -> None:
        """For the run's events; at the last step unless one is given. `verb`: of a command that would have done it.
        `command`: the ID of the one that did it."""
        self.decide(Happened(data, severity, by, self.progress.step if step is None else step, verb, command))

    # ------------------------------------------------------------ commands

    @property
    def wants_new_group(self) -> bool:
        """Return whether a staged edit changes which ranks are live, so that the next step takes a new generation."""
        staged = self.pending.staged
        return any(isinstance(command.args, edits.MEMBERSHIP) for command in staged if command.expires > self.now)

    def folded(self, facts: Facts) -> Settings:
        """Return the settings as the edits staged so far will have made them."""
        settings, step = self.settings, self.planned_step + 1
        for command in self.pending.staged:
            if command.expires <= self.now:
                continue
            with contextlib.suppress(InvalidInputError):  # it stood on an edit that has expired
                settings = edits.apply(settings, command.args, command.node, step, self.config, facts).settings
        return settings

    def carry(self, command: Commanded, step: int, made: AnyEvent | None = None) -> None:
        """The plan of `step` carries the command: it is applied when that step commits, and has then `made` that."""
        carried = Carried(command.verb, command.by, step, self.settings.plan_version, command.node, made)
        self.keep(carried={**self.durable.carried, command.id: carried})

    def uncarry(self, id: str) -> None:
        self.keep(carried={key: value for key, value in self.durable.carried.items() if key != id})

    def put_back(self, id: str) -> None:
        """A side command whose plan a fence has undone waits again, and no longer expires."""
        carried = self.durable.carried[id]
        args = verbs.check(carried.verb, {})
        self.pending.side[carried.verb].append(
            Commanded(id, carried.verb, args, carried.by, carried.node, None, math.inf)
        )
        self.uncarry(id)

    def end_carried(self, step: int) -> None:
        """Commands whose step has been committed (or journaled, while paused) are applied; side plans end their own."""
        for id, carried in list(self.durable.carried.items()):
            if carried.step <= step and carried.verb not in SIDE_KINDS:
                self.end(id, "applied", carried.step, made=carried.made)

    def end_all(
        self,
        queue: list[Commanded],
        state: CommandOutcome,
        step: int | None,
        reason: str = "",
        made: AnyEvent | None = None,
    ) -> None:
        """Give all commands of a queue that outcome."""
        for command in queue:
            self.end(command.id, state, step, reason, made=made)
        queue.clear()

    def end(
        self,
        id: str,
        state: CommandOutcome,
        step: int | None = None,
        reason: str = "",
        *,
        field: str | None = None,
        made: AnyEvent | None = None,
    ) -> None:
        """A command's outcome, final."""
        carried = self.durable.carried.get(id)
        version = carried.plan_version if carried is not None else self.durable.settings.plan_version
        self.uncarry(id)
        self.ends.append(CommandEnded(id, state, step, reason, field, made, version))
        self.decide(self.ends[-1])
