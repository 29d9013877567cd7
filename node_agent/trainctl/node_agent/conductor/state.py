"""State of a conductor: what its parts share, the commands that wait, and the rows that its record is given."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from trainctl.node_agent.conductor.events import Commanded, CommandEnded, Decision, Happened, Persist
from trainctl.node_agent.planning import edits
from trainctl.node_agent.planning.durable import Carried, Durable, Settings
from trainctl.node_agent.planning.share_edits import Facts
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    METRICS,
    Answer,
    RankStep,
    Report,
    Sample,
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
        taken, self.side[kind] = self.side[kind], []
        self.scheduled.discard(kind)
        return taken

    def take_staged(self) -> list[Commanded]:
        taken, self.staged = self.staged, []
        return taken

    def put_back(self, id: str, carried: Carried) -> None:
        """A side command whose plan a fence has undone waits again, and no longer expires."""
        args = verbs.check(carried.verb, {})
        self.side[carried.verb].append(Commanded(id, carried.verb, args, carried.by, carried.node, None, float("inf")))

    def wants_new_group(self, now: float) -> bool:
        """Whether a staged edit changes which ranks are live, so that the next step takes a new generation."""
        return any(isinstance(command.args, edits.MEMBERSHIP) for command in self.staged if command.expires > now)

    def folded(self, settings: Settings, step: int, config: RunFile, facts: Facts, now: float) -> Settings:
        """The settings as the edits staged so far will have made them."""
        for command in self.staged:
            if command.expires <= now:
                continue
            with contextlib.suppress(InvalidInputError):  # it stood on an edit that has expired
                settings = edits.apply(settings, command.args, command.node, step, config, facts).settings
        return settings

    def take_expired(self, now: float) -> Iterator[Commanded]:
        """Hand out and forget what no step could carry in time."""
        queues = [self.staged, *self.side.values(), self.pausing]
        yield from self._take(lambda command: command.expires <= now, queues)

    @property
    def waiting(self) -> list[Commanded]:
        """Everything that waits."""
        return [*self.staged, *(one for side in self.side.values() for one in side), *self.pausing, *self.stopping]

    def take_all(self) -> Iterator[Commanded]:
        """Hand out and forget everything."""
        yield from self._take(lambda _: True, [self.staged, *self.side.values(), self.pausing, self.stopping])

    @staticmethod
    def _take(unwanted: Callable[[Commanded], bool], queues: list[list[Commanded]]) -> Iterator[Commanded]:
        for queue in queues:
            for command in [command for command in queue if unwanted(command)]:
                queue.remove(command)
                yield command


_OF_RUN = frozenset(name for name, metric in METRICS.items() if metric.scope == "run")
"""Values that go to the run's row of a step."""
_OF_OTHERS = frozenset(name for name, metric in METRICS.items() if metric.scope != "rank")
"""Values that don't go to a rank's row of a step; one that no table knows does."""


class RunSums(NamedTuple):
    """Sums over all committed steps of a run."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0

    def after(self, report: Report) -> "RunSums":
        """With the step that it commits."""
        return RunSums(
            self.weight + report.weight, self.tokens + report.tokens, self.seconds + max(report.step_seconds, 0.0)
        )


def step_committed(report: Report, plan: StepPlan, cursor: int, totals: RunSums) -> StepCommitted:
    """The run's row of a step, from the first report of it; `cursor` and `totals` are those after it."""
    return StepCommitted(
        run=report.run, generation=report.generation, step=report.step, committed_at=report.finished_at,
        loss=report.loss_sum / report.weight if report.weight else math.nan, weight=report.weight,
        samples=plan.global_batch, learning_rate=plan.learning_rate, grad_norm=report.grad_norm, cursor=cursor,
        global_batch=plan.global_batch, plan_version=plan.plan_version, step_seconds=report.step_seconds,
        tokens=report.tokens, weight_total=totals.weight, tokens_total=totals.tokens, seconds_total=totals.seconds,
        skipped=report.skipped, values={name: value for name, value in report.values.items() if name in _OF_RUN},
    )  # fmt: skip


def rank_step(report: Report, node: str) -> RankStep:
    """One rank's row of the step it reports."""
    return RankStep(
        run=report.run, generation=report.generation, step=report.step, rank=report.rank, node=node,
        tokens=report.own_tokens, samples=report.own_samples, micro_batch=report.micro_batch, replays=report.replays,
        step_seconds=report.step_seconds, phases=report.phases, weight=report.own_weight,
        values=report.values if _OF_OTHERS.isdisjoint(report.values) else _of_rank(report.values),
    )  # fmt: skip


def _of_rank(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if name not in _OF_OTHERS}


def sample_rows(
    plan: StepPlan, at: float, answers: Sequence[Answer], node: str, by: str, loss: float | None,
    eval_loss: float | None,
) -> Iterator[Sample]:  # fmt: skip
    """A row of the record for each answer, and the losses of its step."""
    how = plan.sampling
    assert how is not None, "a sample plan says what it asks"
    for number, answer in enumerate(answers):
        yield Sample(
            run=plan.run, step=plan.step, at=at, number=number, prompt=answer.prompt, answer=answer.text,
            tokens=answer.tokens, ended=answer.ended, seconds=answer.seconds, loss=loss, eval_loss=eval_loss,
            max_tokens=how.max_tokens, temperature=how.temperature, top_p=how.top_p, seed=how.seed, node=node, by=by,
        )  # fmt: skip


Stage = Literal["loading", "fencing", "offering", "forming", "formed", "leaving", "over"]


class CannotGoOnError(Exception):
    """The run fails; the text is why, in one line."""


class NobodyLeftError(CannotGoOnError):
    """No rank has the state of the record's last step: the run may continue from a checkpoint."""


@dataclasses.dataclass
class Progress:
    """What was committed: the last step, the first position after it, and sums over all steps."""

    step: int = 0
    cursor: int = 0
    totals: RunSums = RunSums()  # noqa: RUF009  immutable
    before: RunSums = RunSums()  # noqa: RUF009  immutable; without the last step
    loss: float | None = None  # of the last step

    def commit(self, plan: StepPlan, report: Report) -> StepCommitted:
        """Move on to the step of `plan`, which `report` commits."""
        self.step, self.cursor = report.step, plan.cursor + plan.global_batch
        self.before, self.totals = self.totals, self.totals.after(report)
        row = step_committed(report, plan, self.cursor, self.totals)
        self.loss = row.loss
        return row


class ConductorState:
    """Shared by the parts of one conductor and written by no one else; pure."""

    def __init__(self, run: str, config: RunFile, durable: Durable, progress: Progress) -> None:
        self.run, self.config = run, config
        self.durable, self.progress = durable, progress
        self.stage: Stage = "loading"
        self.lacking = ""  # what is missing for steps to be made at all, empty if nothing
        self.waiting = ""  # for what data the next step is held back, empty if for none
        self._decisions: list[Decision] = []
        self.ends: list[CommandEnded] = []  # outcomes of commands among what has just been decided

    @property
    def settings(self) -> Settings:
        return self.durable.settings

    def node(self, rank: int) -> str:
        return self.durable.settings.ranks[rank].node

    def nodes(self, ranks: Iterable[int]) -> str:
        """The ranks' nodes as a list in words, each once."""
        return ", ".join(dict.fromkeys(self.node(rank) for rank in ranks))

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
        self, data: AnyEvent, severity: Severity = "info", step: int | None = None, by: str = "auto",
        verb: str | None = None, command: str | None = None,
    ) -> None:  # fmt: skip
        """For the run's events; at the last step unless one is given. `verb`: of a command that would have done it.
        `command`: the ID of the one that did it."""
        self.decide(Happened(data, severity, by, self.progress.step if step is None else step, verb, command))

    def carry(self, command: Commanded, step: int, made: AnyEvent | None = None) -> None:
        """The plan of `step` carries the command: it is applied when that step commits, and has then `made` that."""
        carried = Carried(command.verb, command.by, step, self.settings.plan_version, command.node, made)
        self.keep(carried={**self.durable.carried, command.id: carried})

    def uncarry(self, id: str) -> None:
        self.keep(carried={key: value for key, value in self.durable.carried.items() if key != id})

    def conclude(self, step: int) -> None:
        """Commands whose step has been committed (or journaled, while paused) are applied; side plans end their own."""
        for id, carried in list(self.durable.carried.items()):
            if carried.step <= step and carried.verb not in SIDE_KINDS:
                self.end(id, "applied", carried.step, made=carried.made)

    def end(
        self, id: str, state: Literal["applied", "rejected", "expired", "failed"], step: int | None = None,
        reason: str = "", field: str | None = None, made: AnyEvent | None = None,
    ) -> None:  # fmt: skip
        """A command's outcome, final."""
        known = self.durable.carried.get(id)
        version = known.plan_version if known is not None else self.durable.settings.plan_version
        self.uncarry(id)
        self.ends.append(CommandEnded(id, state, step, reason, field, made, version))
        self.decide(self.ends[-1])
