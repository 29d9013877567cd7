"""Notes on ended runs: once for each command, in the record of the run that they are about."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import FIRST, part, plan, rows, step
from tests.node_agent.support.simulation import durable

from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import AgentDb, FollowedRun, JournaledCommand, digest_of
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.command_journal import CommandJournal, Handlers
from trainctl.node_agent.runs.late_events import LateNotes
from trainctl.node_agent.runs.session import Session
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages.events import RunBranched
from trainctl.protocol.record.paths import RunPaths, runs_directory

ID = "8b7c6d5e-0000-4000-8000-000000000001"
BRANCHED = m.LateEvent("run-1", 1005.5, "anna", "info", 6, RunBranched("run-1", 6, "run-2", "forge"))


class Idle:
    """Nothing is conducted; or, busy without a session, something is being resumed."""

    session: Session | None = None
    is_busy = False


class World:
    def __init__(self, folder: Path, db: AgentDb) -> None:
        self.db, self.published, self.idle = db, list[m.Event](), Idle()
        self._guests = GuestRuns("studio", folder, db, lambda _: None)
        self.late_notes = self.late_notes_of()
        self.paths = RunPaths(runs_directory(folder) / "run-1")
        self.paths.directory.mkdir(parents=True)
        db.add_run("run-1", "tiny", 1000.0, "finished")
        with RunDb(self.paths) as recorder:
            recorder.plan(plan(7), 999.0)
            recorder.commit(step(7), [part(7)], 1000.0)

    def late_notes_of(self) -> LateNotes:
        return LateNotes("studio", self.db, self.published.append, self.idle, self._guests)

    def asked(self, run: str | None = None, id: str = ID) -> JournaledCommand:
        command = m.Command(rid="r", id=id, verb="note", args={"text": "bad data"}, by="anna", run=run)
        self.db.accept(command, digest_of(command), 1000.0)
        found = self.db.find(id)
        assert found is not None
        return found

    @property
    def notes(self) -> list[tuple[object, ...]]:
        return rows(self.paths, "SELECT step, by, text, command FROM events WHERE kind = 'note'")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with AgentDb(tmp_path / "agent.db") as db:
        yield World(tmp_path, db)


def test_a_note_is_made_once_at_the_last_step_and_told(world: World) -> None:
    row = world.asked()
    for _ in range(2):
        ended = world.late_notes.note(row)
        assert (ended.state, ended.step) == ("applied", 7)
    assert world.notes == [(7, "anna", "bad data", ID)]
    (event,) = world.published
    assert (event.run, event.step, event.generation, event.text) == ("run-1", 7, FIRST, "bad data")
    found = world.db.find(ID)
    assert found is not None and found.run == "run-1", "the command says which run it turned out to be about"


def test_what_is_elsewhere_gone_or_just_beginning_takes_no_note(world: World) -> None:
    with pytest.raises(InvalidInputError, match=r"no run 'run-9' on studio"):
        world.late_notes.note(world.asked("run-9", ID[:-1] + "2"))
    row = world.asked()
    world.idle.is_busy = True
    with pytest.raises(RefusedError, match="being resumed"):
        world.late_notes.note(row)
    world.idle.is_busy = False
    world.db.follow(FollowedRun("run-1", 1, "forge", "tcp://127.0.0.1:1"))
    with pytest.raises(InvalidInputError, match="was led by forge"):
        world.late_notes.note(row)
    world.db.unfollow("run-1")
    assert world.notes == []
    world.paths.directory.rename(world.paths.directory.with_name("moved"))
    with pytest.raises(InvalidInputError, match="no longer in"):
        world.late_notes.note(row)
    assert not world.late_notes.take(BRANCHED), "its disk may come back"
    assert not world.paths.directory.exists(), "nothing is made where the record was"


def late_rows(world: World) -> list[tuple[object, ...]]:
    return rows(world.paths, "SELECT at, by, severity, step FROM events ORDER BY id")


def test_an_event_of_another_node_is_written_once_however_often_it_is_repeated(world: World) -> None:
    other = msgspec.structs.replace(BRANCHED, at=1010.0, data=msgspec.structs.replace(BRANCHED.data, branch="run-3"))
    assert all(world.late_notes.take(late) for late in (BRANCHED, BRANCHED, other))
    assert world.late_notes_of().take(BRANCHED), "of the agent after a restart"
    assert late_rows(world) == [(1005.5, "anna", "info", 6), (1010.0, "anna", "info", 6)]
    assert [event.data for event in world.published] == [BRANCHED.data, other.data]


def test_events_of_runs_that_were_not_led_here_are_not_written(world: World) -> None:
    assert world.late_notes.take(msgspec.structs.replace(BRANCHED, run="run-9"))
    world.db.follow(FollowedRun("run-1", 1, "forge", "tcp://127.0.0.1:1"))
    assert world.late_notes.take(BRANCHED)
    world.db.unfollow("run-1")
    world.idle.is_busy = True
    assert not world.late_notes.take(BRANCHED)
    assert late_rows(world) == []
    world.idle.is_busy = False  # what is being resumed may be that run; its record has one writer
    assert world.late_notes.take(BRANCHED)
    assert len(late_rows(world)) == 1


async def test_one_that_was_written_when_the_agent_was_killed_is_told_as_written(world: World) -> None:
    """It makes no difference whether a run is conducted again after the restart or not."""

    async def answer(identity: bytes, reply: m.CommandReply) -> None: ...

    unused: Any = None
    journal = CommandJournal(
        world.db,
        answer,
        world.idle,
        Handlers(unused, unused, unused, world.late_notes.note, unused),
        GuestRuns("studio", world.paths.directory, world.db, lambda _: None),
    )
    world.late_notes.note(world.asked())
    await journal.fail_open()
    found = world.db.find(ID)
    assert found is not None and (found.state, found.step) == ("applied", 7)
    world.asked("run-1", other := ID[:-1] + "3")
    await journal.conduct_again(SimpleNamespace(run="run-2", conductor=SimpleNamespace(durable=durable())))  # type: ignore[arg-type]
    found = world.db.find(other)
    assert found is not None and (found.state, found.run) == ("applied", "run-1")
    assert len(world.notes) == 2
