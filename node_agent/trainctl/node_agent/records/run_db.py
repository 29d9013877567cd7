"""A run's record.db: plans are journaled, steps committed with their rollups, events and readings kept.

Writes return at once, and are executed in their order by the record's own thread; `settled` waits for them. One that
can't be done (the disk is full or fails, another process has the record locked) raises nothing: it waits in memory with
those after it, `problem` says so, and all are written once they can be.
"""

import contextlib
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar

import msgspec

from trainctl.node_agent.records import statements as writes
from trainctl.node_agent.records.keys import EVENTS_KEY
from trainctl.node_agent.records.record_writer import RecordWriter
from trainctl.protocol.errors import DamagedError, InvalidInputError, ProtocolError
from trainctl.protocol.messages import (
    MAX_COUNT,
    CommandState,
    Event,
    Generation,
    HeldOutPairs,
    HostReading,
    Kept,
    KeptDrifts,
    KeptEvaluation,
    KeptEvent,
    KeptPairs,
    KeptPart,
    KeptPlan,
    KeptRetraction,
    KeptSample,
    KeptStep,
    KeptValue,
    RankStep,
    Sample,
    Severity,
    StepCommitted,
    StepPlan,
)
from trainctl.protocol.messages.events import AnyEvent
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.record.schema import (
    RANK_STEP_COLUMNS,
    UNREADABLE,
    open_for_reading,
    refusing_damage,
    sync_commits,
)
from trainctl.protocol.wire.codec import decode_stored

T = TypeVar("T")

HOST_EVERY_SECONDS = 10.0
HOST_KEPT_SECONDS = 7 * 86400.0
TEXT_CHARACTERS = 1000
"""Most characters of an event's text, so that a page of events stays far below the frame limit."""
RECENT_PLANS = 32
PLANS_KEPT = 10_000
CHECKPOINTS_EVERY_PLANS = 500
"""Plans between looks at which checkpoints still exist."""
EVENTS_RESERVED, EVENTS_AHEAD = 256, 64
"""Ids of events that are reserved at once, and how many are left when the next ones are."""
FORGET_EVERY_STEPS = 100
"""Steps between removals of old metrics by name, each of which takes some milliseconds."""


@dataclass(frozen=True)
class LastState:
    """State from which an agent that restarts continues."""

    step: StepCommitted | None  # the newest committed one
    rank_steps: tuple[RankStep, ...]  # of that step
    generation: Generation | None  # the highest in plans and steps
    plan: StepPlan | None  # the last one journaled in this protocol version
    plans: tuple[StepPlan, ...]  # the last RECENT_PLANS of them, oldest first
    seq: int  # of the last plan journaled, 0 if there is none
    evaluation: Evaluation | None  # the newest
    events: tuple[Event, ...]  # the newest 100, oldest first


class RunDb:
    """Open for the life of a run. Raises InvalidInputError if the record cannot be used."""

    def __init__(self, directory: RunPaths, *, resumable: bool = True) -> None:
        """`resumable`: this record is what the run is taken up from again, so plans that this needs are kept."""
        self._paths, self._run = directory, directory.directory.name
        self._writer = RecordWriter(directory.record, partial(add_rank_records, directory))
        self._values: dict[str, str] = {}  # that were kept since it was opened
        try:
            ((self._last_event,),) = self._rows("SELECT max(0, coalesce(max(id), 0)) FROM events")
            with refusing_damage(directory.record, ValueError):
                self._reserved = self._event_floor = int(self.meta(EVENTS_KEY) or 0)
        except InvalidInputError:
            self._writer.close()
            raise
        self._host_read_at: dict[str, float] = {}
        self.on_kept: Callable[[Kept], None] = lambda _: None
        """Is given all that the run's other nodes are to keep as well."""
        self._told_step: tuple[int, Generation] | None = None
        self._steps = 0  # committed since it was opened
        self._resumable = resumable
        # Plans of later steps are kept.
        self._needed_after: int = checkpoints.oldest_step(directory.checkpoints) if resumable else MAX_COUNT

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Write what waits if it can be, and let the record go."""
        if self._reserved > self._last_event > self._event_floor:
            self._reserved = self._last_event
            self.set_meta(EVENTS_KEY, str(self._reserved), own=True)
        self._writer.close()

    @property
    def problem(self) -> str | None:
        """One line on what is wrong with the record, the same until that changes; None if nothing is."""
        return self._writer.problem

    async def settled(self) -> None:
        """Wait until all that was given is written, or can't be for now. What others may act on is announced then."""
        await self._writer.settled()

    def flush(self) -> bool:
        """Wait, without a loop, until all that was given is written; False if it can't be for now."""
        return self._writer.settle()

    def require(self) -> None:
        """Raises BusyError if another process has the record locked."""
        self._writer.require()

    def plan(self, plan: StepPlan, at: float, *, durable: bool = False) -> None:
        """Journal a plan before it is passed on; with `durable` (it carries commands) a power cut keeps it too.

        Plans past the newest PLANS_KEPT go, once no checkpoint is left that a run could continue from with them.
        """
        if self._resumable and plan.seq % CHECKPOINTS_EVERY_PLANS == 0:
            self._needed_after = checkpoints.oldest_step(self._paths.checkpoints)
        self._writer.put(writes.plan(plan, at, plan.seq - PLANS_KEPT, self._needed_after), durable=durable)
        self.on_kept(KeptPlan(plan=plan))

    def commit(self, step: StepCommitted, ranks: Sequence[RankStep], finished_at: float) -> None:
        """Keep a committed step and parts of ranks in it, with their place in the rollups; what is kept already stays.

        `add_part` adds parts that come in later. A standing row of the step in another
        generation is retracted by it. `finished_at` is when the ranks' update ended, in Unix seconds.
        """
        self._writer.put(writes.commit(step, ranks, finished_at))
        if (step.step, step.generation) != self._told_step:
            self._told_step = step.step, step.generation
            self._forget_values()
            self.on_kept(KeptStep(step=step))
        for part in ranks:
            self.on_kept(KeptPart(part=part))

    def known_step(self, step: StepCommitted) -> None:
        """Keep a step as the run's lead has it, which may have committed it again: its row is what stands."""
        self._writer.put(writes.known_step(step))
        self._forget_values()

    def _forget_values(self) -> None:
        """Every FORGET_EVERY_STEPS steps, let go of the metrics by name that are old."""
        self._steps += 1
        if self._steps % FORGET_EVERY_STEPS == 0:
            self._writer.put(writes.forget_values)

    def known_part(self, part: RankStep, finished_at: float) -> None:
        """Keep a rank's part in a step that is in the record already, as the run's lead has it."""
        self._writer.put(writes.known_part(part, finished_at))

    def add_part(self, part: RankStep, finished_at: float) -> None:
        """Keep a rank's part in a step that is committed already, whose row is left as it is, in copies, too."""
        self._writer.put(writes.parts([part], finished_at))
        self.on_kept(KeptPart(part=part))

    def retract_after(self, step: int, event: int | None = None) -> None:
        """Mark every step above `step`, as when a run continues from an older checkpoint, and hide the events above
        `event` (None: none), which were of a conductor that had been replaced."""
        self._writer.forget_newest()
        self._writer.put(writes.retract_after(step))
        if event is not None:
            self._writer.put(writes.hide_events(event))
            self._last_event = min(self._last_event, event)
        self.on_kept(KeptRetraction(after_step=step, after_event=event))

    def is_retracted(self, step: int, generation: Generation) -> bool:
        """Return whether the step was committed in this generation, and marked since."""
        return self._read(lambda reader: reader.is_retracted(step, generation))

    def event(
        self,
        at: float,
        data: AnyEvent,
        severity: Severity,
        by: str,
        *,
        step: int | None = None,
        generation: Generation | None = None,
        command: str | None = None,
        verb: str | None = None,
        outcome: CommandState | None = None,
        undoes: str | None = None,
    ) -> Event:
        """Keep what happened `at` (Unix seconds) and return it with its id, above the last and all that a power cut may
        have taken: other nodes and clients may have those."""
        self._last_event = max(self._last_event, self._event_floor) + 1
        if self._last_event > self._reserved - EVENTS_AHEAD:
            is_late, self._reserved = self._last_event > self._reserved, self._last_event + EVENTS_RESERVED
            self.set_meta(EVENTS_KEY, str(self._reserved), own=True, durable=True)
            if is_late:
                self.flush()
        event = Event(
            id=self._last_event,
            at=at,
            severity=severity,
            by=by,
            data=_clipped(data),
            run=self._run,
            step=step,
            generation=generation,
            command=command,
            verb=verb,
            outcome=outcome,
            undoes=undoes,
        )
        self._writer.put(writes.event(event))
        self.on_kept(KeptEvent(event=event))
        return event

    def note_of(self, command: str) -> int | None:
        """The step at which the note that a command asked for was made, None if it was not."""
        rows = self._rows("SELECT step FROM events WHERE command = ? AND kind = 'note'", (command,))
        return (rows[0][0] or 0) if rows else None

    def known_event(self, event: Event) -> None:
        """Keep an event under the id that another node has given it."""
        self._last_event = max(self._last_event, event.id)
        self._writer.put(writes.event(event))

    def evaluation(
        self,
        step: int,
        at: float,
        loss: float,
        weight: float,
        seconds: float,
        values: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Keep a loss on the held-out samples (nats per unit of weight) with the metrics beside it, or if it is already
        kept change nothing."""
        self._writer.put(writes.evaluation(Evaluation(step, at, loss, weight, seconds, values)))
        self.on_kept(KeptEvaluation(step=step, at=at, loss=loss, weight=weight, seconds=seconds, values=dict(values)))

    def pairs(self, made: HeldOutPairs) -> None:
        """Keep the held-out pairs of an evaluation, or if they are already kept change nothing."""
        self._writer.put(writes.pairs(made))
        self.on_kept(KeptPairs(pairs=made))

    def sample(self, sample: Sample) -> None:
        """Keep an answer of the model, or if it is already kept change nothing."""
        self._writer.put(writes.sample(sample))
        self.on_kept(KeptSample(sample=sample))

    def drifts(self, step: int, at: float, found: Mapping[int, float]) -> None:
        """Keep by how much each rank's parameters differed (relative) from those it was given after `step`."""
        self._writer.put(writes.drifts(step, at, found))
        self.on_kept(KeptDrifts(step=step, at=at, ranks=tuple(found), drifts=tuple(found.values())))

    def host(self, reading: HostReading) -> None:
        """Keep one reading of a node every HOST_EVERY_SECONDS, for HOST_KEPT_SECONDS; they don't wait for room."""
        since_last = reading.read_at - self._host_read_at.get(reading.node, 0.0)
        if 0 <= since_last < HOST_EVERY_SECONDS - 0.5 or self.is_refused:  # half a second for a timer's jitter
            return
        self._host_read_at[reading.node] = reading.read_at
        self._writer.put(writes.host(reading, reading.read_at - HOST_KEPT_SECONDS))

    def set_meta(self, key: str, value: str, *, own: bool = False, durable: bool = False) -> None:
        """Keep a value; `own`: of no use to the run's other nodes; `durable`: a power cut keeps it and all before."""
        self._values[key] = value
        self._writer.put(writes.meta(key, value), durable=durable)
        if not own:
            self.on_kept(KeptValue(key=key, value=value))

    def meta(self, key: str) -> str | None:
        """A value that is kept. Raises InvalidInputError if the record is damaged."""
        if key in self._values:
            return self._values[key]
        rows = self._rows("SELECT value FROM meta WHERE key = ?", (key,))
        return rows[0][0] if rows else None

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._writer.rows(sql, values)

    def sync(self) -> None:
        """Have the disk keep what has been written; may be called on any thread. Raises OSError."""
        sync_commits(self._paths.record)

    @property
    def is_behind(self) -> bool:
        """Return whether something waits in memory."""
        return self._writer.is_behind

    @property
    def is_refused(self) -> bool:
        """Return whether what waits in memory can't be written for now."""
        return self._writer.refusal is not None

    def highest_generation(self) -> Generation | None:
        """Return the highest generation of all steps ever committed, retracted ones too; None before the first."""
        rows = self._rows("SELECT term, n FROM steps ORDER BY term DESC, n DESC LIMIT 1")
        return Generation(*rows[0]) if rows else None

    def newest(self) -> tuple[int, Generation | None, int, int]:
        """The newest step that stands with its generation, the newest event's id and the newest plan's number; zeros
        for what the record has none of."""
        steps = self._rows("SELECT step, term, n FROM steps WHERE NOT retracted ORDER BY step DESC LIMIT 1")
        plans = self._rows("SELECT seq FROM plans ORDER BY term DESC, n DESC, seq DESC LIMIT 1")
        step, generation = (steps[0][0], Generation(*steps[0][1:])) if steps else (0, None)
        return step, generation, self._last_event, plans[0][0] if plans else 0

    def newest_steps(self, count: int) -> tuple[StepCommitted, ...]:
        """The newest `count` steps that stand, oldest first."""

        def read(reader: RecordReader) -> tuple[StepCommitted, ...]:
            last = reader.last_step()
            return tuple(reader.steps(max(last.step - count, 0), count)[0]) if last is not None else ()

        return self._read(read)

    def last_state(self) -> LastState:
        """Return the run's last state by its record. Raises InvalidInputError if it cannot be read."""

        def read(reader: RecordReader) -> tuple[StepCommitted | None, tuple[RankStep, ...]]:
            step = reader.last_step()
            return step, tuple(reader.rank_steps(step.step)) if step else ()

        step, rank_steps = self._read(read)
        evaluations = self._read(lambda reader: reader.evaluations())
        events, _ = self._read(lambda reader: reader.events(limit=100, newest=True))
        newest = self._rows("SELECT term, n, seq FROM plans ORDER BY term DESC, n DESC, seq DESC LIMIT 1")
        seen = ([step.generation] if step else []) + [Generation(term, n) for term, n, _ in newest]
        plans, seq = self._last_plans(), newest[0][2] if newest else 0
        return LastState(
            step,
            rank_steps,
            max(seen, default=None),
            plans[-1] if plans else None,
            plans,
            seq,
            evaluations[-1] if evaluations else None,
            events,
        )

    @property
    def path(self) -> Path:
        return self._paths.record

    def train_plan(self, step: int) -> StepPlan | None:
        """The newest plan journaled for `step`, None if there is none."""
        rows = self._rows(
            "SELECT body FROM plans WHERE kind = 'train' AND step = ? ORDER BY term DESC, n DESC, seq DESC LIMIT 1",
            (step,),
        )
        return self._plan_in(rows[0][0]) if rows else None

    def checkpoint_plan(self) -> StepPlan | None:
        """The newest plan journaled for a checkpoint, None if there is none."""
        rows = self._rows(
            "SELECT body FROM plans WHERE kind = 'checkpoint' ORDER BY term DESC, n DESC, seq DESC LIMIT 1"
        )
        return self._plan_in(rows[0][0]) if rows else None

    def _last_plans(self) -> tuple[StepPlan, ...]:
        bodies = self._rows("SELECT body FROM plans ORDER BY term DESC, n DESC, seq DESC LIMIT ?", (RECENT_PLANS,))
        decoded = (self._plan_in(body) for (body,) in reversed(bodies))
        return tuple(plan for plan in decoded if plan is not None)

    def _plan_in(self, body: bytes) -> StepPlan | None:
        try:
            plan: StepPlan = decode_stored(body, StepPlan)
        except ProtocolError:
            return None  # damaged, or of a program before or after this one: no trainer that this one talks to has it
        return plan

    def _read(self, read: Callable[[RecordReader], T]) -> T:
        """Return what `read` finds in the record, which is made again if it is damaged."""
        self.flush()
        try:
            with RecordReader(self._paths) as reader:
                return read(reader)
        except DamagedError:
            self._writer.remake()
        with RecordReader(self._paths) as reader:
            return read(reader)


def add_rank_records(paths: RunPaths, connection: sqlite3.Connection) -> None:
    """Add the ranks' parts in steps, as their own records have them, to a record that is made again."""
    for file in sorted(paths.directory.glob("rank-*.db")):
        with contextlib.suppress(*UNREADABLE, InvalidInputError), contextlib.closing(open_for_reading(file)) as own:
            rows = own.execute("SELECT * FROM rank_steps").fetchall()
            marks = ", ".join("?" * RANK_STEP_COLUMNS)
            connection.executemany(f"INSERT OR IGNORE INTO rank_steps VALUES ({marks})", rows)  # noqa: S608


def _clipped(data: AnyEvent) -> AnyEvent:
    texts = {name: value for name, value in msgspec.structs.asdict(data).items() if isinstance(value, str)}
    long = {name: f"{text[: TEXT_CHARACTERS - 1]}…" for name, text in texts.items() if len(text) > TEXT_CHARACTERS}
    return msgspec.structs.replace(data, **long) if long else data
