"""Events of runs that aren't led here: those for the node that leads or led the run, until it has taken them, and notes
on a run that has ended here, or on a live one of another program."""

import contextlib
import time
from collections.abc import Callable, Collection

import msgspec

from trainctl.node_agent.conductor.events import CommandEnded, Happened
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import AgentDb, JournaledCommand, KnownRun
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.session import Conducting
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import Event, LateEvent, verbs
from trainctl.protocol.messages.events import NoteWritten, RunBranched
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

MOST_EVENTS = 16
"""Events in one answer to a ping. The next ones are sent once these are taken."""


class _Waiting(msgspec.Struct):
    lead: str
    event: LateEvent


class LateEvents:
    """Events that wait for their lead. They outlive the agent, as the lead's machine may be switched off."""

    def __init__(self, db: AgentDb) -> None:
        self._db, self._waiting = db, list[_Waiting]()
        with contextlib.suppress(msgspec.MsgspecError):
            self._waiting = msgspec.json.decode(db.late_events or "[]", type=list[_Waiting])

    def add(self, lead: str, event: LateEvent) -> None:
        """To be sent to the node that led the run."""
        self._keep([*self._waiting, _Waiting(lead, event)])

    def for_lead(self, lead: str) -> tuple[LateEvent, ...]:
        """Return what an answer to a ping of this node says, oldest first."""
        return tuple(waiting.event for waiting in self._waiting if waiting.lead == lead)[:MOST_EVENTS]

    def remove(self, lead: str, branches: Collection[str]) -> None:
        """This node has taken the events of these branches."""
        left = [
            waiting for waiting in self._waiting if waiting.lead != lead or waiting.event.data.branch not in branches
        ]
        if len(left) < len(self._waiting):
            self._keep(left)

    def _keep(self, waiting: list[_Waiting]) -> None:
        self._waiting = waiting
        self._db.late_events = msgspec.json.encode(waiting).decode()


NEWEST_EVENTS = 500
"""Events of a run's record among which one that is repeated may be."""


class LateNotes:
    """Takes notes on runs of this node's db that it doesn't lead."""

    def __init__(
        self, node: str, db: AgentDb, publish: Callable[[Event], object], conducting: Conducting, guests: GuestRuns
    ) -> None:
        self._node, self._db, self._publish, self._conducting = node, db, publish, conducting
        self._guests = guests
        self._taken: set[LateEvent] = set()

    def note(self, row: JournaledCommand) -> CommandEnded:
        """Write a note, once for each command: asked for again, it tells at which step it stands.

        Raises InvalidInputError where there is no such run, or it isn't this node's, and RefusedError where its record
        can't be written.
        """
        args = verbs.check("note", row.args)
        assert isinstance(args, verbs.Note)
        run = self._run_of(row)
        self._db.set_run(row.id, run.run)
        paths = RunPaths(run.directory)
        if not paths.record.exists():
            raise InvalidInputError("run", f"the record is no longer in {paths.directory}")
        guest = self._guests.find(run.run)  # its record is open, and has one writer
        with contextlib.nullcontext(guest.recorder) if guest is not None else RunDb(paths, resumable=False) as recorder:
            noted = recorder.note_of(row.id)
            if noted is None:
                last = recorder.last_state()
                noted = last.step.step if last.step is not None else 0
                event = recorder.event(
                    time.time(),
                    NoteWritten(args.text),
                    "info",
                    row.by,
                    step=noted,
                    generation=last.generation,
                    command=row.id,
                )
                if recorder.note_of(row.id) is None:
                    raise RefusedError(recorder.problem or f"{paths.record} can't be written")
                self._publish(event)
        return CommandEnded(row.id, "applied", noted)

    def take(self, late: LateEvent) -> bool:
        """Write an event of a run that this node led into the run's record, once. False: it can't be written now, and
        is to be repeated. An event of a run that this node doesn't lead is taken, but not written."""
        if late in self._taken:
            return True
        if self._conducting.is_busy and self._conducting.session is None:
            return False
        known, session = self._db.known_run(late.run), self._conducting.session
        if known is None or known.kind != "hosted" or self._db.followed(late.run) is not None:
            return True
        with contextlib.suppress(InvalidInputError):
            if not _has(RunPaths(known.directory), late.data):
                if session is not None and session.run == late.run:
                    session.note(Happened(late.data, late.severity, late.by, late.step))
                else:
                    self._write(late, RunPaths(known.directory))
            self._taken.add(late)
        return late in self._taken

    def _write(self, late: LateEvent, paths: RunPaths) -> None:
        with RunDb(paths, resumable=False) as recorder:
            event = recorder.event(late.at, late.data, late.severity, late.by, step=late.step)
            if not recorder.flush():
                raise InvalidInputError(str(paths.record), recorder.problem or "can't be written")
            self._publish(event)

    def _run_of(self, row: JournaledCommand) -> KnownRun:
        """The run that it names, or the newest."""
        if self._conducting.is_busy and self._conducting.session is None:
            raise RefusedError("a run is being resumed; try again in a moment")
        known = self._db.runs()
        found = next((run for run in known if row.run in (None, run.run)), None)
        if found is None:
            raise InvalidInputError("run", f"no run {row.run!r} on {self._node}" if row.run else "there is no run yet")
        followed = self._db.followed(found.run)
        if followed is not None:
            raise InvalidInputError("run", f"{found.run} was led by {followed.lead}; send the note to its agent")
        return found


def _has(paths: RunPaths, data: RunBranched) -> bool:
    """Return whether the record has such an event among its newest. Raises InvalidInputError without a record that can
    be read."""
    with RecordReader(paths) as reader:
        events, _ = reader.events(limit=NEWEST_EVENTS, newest=True)
    return any(event.data == data for event in events)
