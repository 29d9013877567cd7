"""The agent's db: commands are accepted once and end once, and others' events wait until they are taken."""

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.node_agent.support.processes import kill_after, locked, python
from tests.waiting import until

from trainctl.node_agent.records.agent_db import AgentDb, digest_of
from trainctl.node_agent.runs.late_events import MOST_EVENTS, LateEvents
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages.events import RunBranched

ID = "8b7c6d5e-0000-4000-8000-000000000001"


def command(number: int = 1, **changes: object) -> m.Command:
    id = f"8b7c6d5e-0000-4000-8000-{number:012x}"
    made = m.Command(rid="r", id=id, verb="resize-batch", args={"micro": 8}, by="anna", node="a")
    return msgspec.structs.replace(made, **changes)


def end(db: AgentDb, id: str, state: m.CommandState, **outcome: object) -> None:
    row = db.find(id)
    assert row is not None
    db.outcome(msgspec.structs.replace(row, state=state, **outcome))


@pytest.fixture
def db(tmp_path: Path) -> Iterator[AgentDb]:
    with AgentDb(tmp_path / "agent.db") as made:
        yield made


def test_an_accepted_command_is_found_with_all_it_said(tmp_path: Path) -> None:
    asked = command(args={"micro": 8, "deep": {"list": [1, 2.5, None, "é"]}}, run="run-1", if_plan=3, ttl_seconds=5.0)
    with AgentDb(tmp_path / "agent.db") as db:
        assert db.find(ID) is None
        assert db.accept(asked, digest_of(asked), 1000.0)
        assert not db.accept(command(verb="pause"), "two", 2000.0), "its id is taken"
    with AgentDb(tmp_path / "agent.db") as db:
        found = db.find(ID)
        assert found is not None and found.is_open and found.digest == digest_of(asked)
        assert (found.verb, found.args, found.by, found.run) == ("resize-batch", asked.args, "anna", "run-1")
        assert (found.node, found.if_plan, found.received_at, found.ttl_seconds) == ("a", 3, 1000.0, 5.0)
        assert db.open_commands() == (found,)


def test_a_command_ends_once(db: AgentDb) -> None:
    db.accept(command(), "one", 1000.0)
    db.accept(command(2), "two", 999.0)
    assert [found.id[-1] for found in db.open_commands()] == ["2", "1"]
    end(db, ID, "applied", step=17, before="8", after="4", ended_at=1001.0)
    end(db, ID, "failed", reason="too late", ended_at=1002.0)
    found = db.find(ID)
    assert found is not None and not found.is_open and found.ended_at == 1001.0
    assert found.reply("again") == m.CommandReply(
        rid="again", id=ID, state="applied", step=17, before="8", after="4"
    )  # fmt: skip
    assert [found.id[-1] for found in db.open_commands()] == ["2"]
    end(db, command(2).id, "rejected", reason="0 is below 1", field="micro", run="run-9")
    found = db.find(command(2).id)
    assert found is not None and (found.state, found.field, found.run) == ("rejected", "micro", "run-9")


def test_the_digest_is_of_the_body_and_of_nothing_else() -> None:
    others: list[dict[str, object]] = [
        {"verb": "pause"}, {"args": {"micro": 9}}, {"args": {"micro": 8.0}}, {"node": None}, {"run": "r"},
        {"if_plan": 0},
    ]  # fmt: skip
    assert all(digest_of(command(**other)) != digest_of(command()) for other in others)
    same = command(2, by="bert", rid="other", issued_at=5.0, ttl_seconds=9.0)
    assert digest_of(same) == digest_of(command())
    ordered, reordered = {"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 2, "x": 1}, "a": 1}
    assert digest_of(command(args=ordered)) == digest_of(command(args=reordered))
    assert digest_of(command(args={"key": b"\x00\xff", "map": {b"k": 1}})) != digest_of(command(args={"key": b"\x00"}))
    journaled = "105eb00e146afc6de7e9ea47d5a5aef158063da17d644321e3b286edbdee13bb"
    assert digest_of(command()) == journaled, "what an older agent has journaled must still compare equal"


def test_only_the_highest_generation_is_kept(tmp_path: Path) -> None:
    with AgentDb(tmp_path / "agent.db") as db:
        assert db.generation is None
        assert db.saw(m.Generation(1, 10)) and db.saw(m.Generation(1, 10))
        assert not db.saw(m.Generation(1, 9))
        assert db.saw(m.Generation(2, 0)) and not db.saw(m.Generation(1, 999))
    with AgentDb(tmp_path / "agent.db") as db:
        assert db.generation == m.Generation(2, 0)


def test_a_disk_that_refuses_stops_commands_but_not_their_ends(db: AgentDb, tmp_path: Path) -> None:
    db.accept(command(), "one", 1000.0)
    row = db.find(ID)
    assert row is not None
    with locked(tmp_path / "agent.db") as pid:
        with pytest.raises(RefusedError, match=rf"agent\.db: locked by process {pid} .*: command not journaled"):
            db.accept(command(2), "two", 1000.0)
        db.outcome(msgspec.structs.replace(row, state="applied", step=3, ended_at=1001.0))
        assert db.saw(m.Generation(3, 1)) and db.generation == m.Generation(3, 1)
        assert db.is_busy and f"locked by process {pid}" in (db.problem or "")
    until(lambda: db.retry() or not db.is_busy)
    found = db.find(ID)
    assert found is not None and found.state == "applied" and db.problem is None
    assert db.find(command(2).id) is None


def test_one_from_before_0_2_0_is_refused_in_a_line_and_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "agent.db"
    connection = sqlite3.connect(file)
    connection.execute("PRAGMA user_version=1")
    connection.close()
    before = file.read_bytes()
    with pytest.raises(InvalidInputError, match=r"agent\.db: schema 1 is older .*; use trainctl 0\.2\.0 .*, or move"):
        AgentDb(file)
    assert file.read_bytes() == before


ACCEPTER = """
    import sys
    from pathlib import Path
    import msgspec
    from trainctl.node_agent.records.agent_db import AgentDb
    from trainctl.protocol import messages as m

    db, number = AgentDb(Path(sys.argv[1])), int(sys.argv[2])
    while True:
        number += 1
        id = f"8b7c6d5e-0000-4000-8000-{number:012x}"
        assert db.accept(m.Command(rid="r", id=id, verb="pause"), "digest", 0.0)
        if number % 2:
            db.outcome(msgspec.structs.replace(db.find(id), state="applied", step=number, ended_at=1.0))
        print(number, flush=True)
"""


def test_killing_the_agent_ten_times_loses_no_accepted_command(tmp_path: Path) -> None:
    chance, accepted = random.Random(11), 0
    for turn in range(10):
        writer = python(ACCEPTER, str(tmp_path / "agent.db"), str(1000 * turn))
        accepted = max(map(int, kill_after(writer, chance.randint(1, 12))))
        with AgentDb(tmp_path / "agent.db") as db:
            for number in range(1000 * turn + 1, accepted + 1):
                found = db.find(f"8b7c6d5e-0000-4000-8000-{number:012x}")
                assert found is not None and found.state == ("applied" if number % 2 else "accepted"), number


def test_a_node_consents_to_one_claimant_a_term_also_after_a_restart(tmp_path: Path) -> None:
    with AgentDb(tmp_path / "agent.db") as db:
        assert db.term == 0
        assert db.consent(2, "beta", "run-1") == "beta"
        assert db.consent(2, "gamma", "run-1") == "beta"
    with AgentDb(tmp_path / "agent.db") as db:
        assert (db.term, db.generation) == (2, None)
        assert (db.consent(2, "beta", "run-1"), db.consent(2, "gamma", "run-1")) == ("beta", "beta")
        assert (db.consented_term("run-1"), db.consented_term("run-2")) == (2, 0)
        assert db.consent(3, "gamma", "run-2") == "gamma"
        assert db.consent(2, "beta", "run-1") == "gamma in term 3"
        db.saw(m.Generation(5, 1))
        assert db.term == 5


def test_a_consent_outlives_a_database_that_is_destroyed_under_it(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with AgentDb(path) as db:
        db.consent(2, "beta", "run-1")
        db.saw(m.Generation(1, 3))
        for file in (path, path.with_name("agent.db-wal")):
            file.write_bytes(b"nothing of SQLite" * 1000)
        db._connection.execute("PRAGMA shrink_memory")  # what it has read by now it would not read again
        db.set_run_state("run-1", "running")
        assert not db.may_have_forgotten_consent
    with AgentDb(path) as db:
        assert (db.consented_term("run-1"), db.generation) == (2, m.Generation(1, 3))
        assert [*tmp_path.glob("agent.db.damaged-*")]


def test_a_database_that_was_destroyed_while_no_agent_ran_says_that_it_may_have_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "agent.db"
    with AgentDb(path) as db:
        assert not db.may_have_forgotten_consent
        db.consent(2, "beta", "run-1")
    path.write_bytes(b"nothing of SQLite" * 1000)
    with AgentDb(path) as db:
        assert db.may_have_forgotten_consent
        assert db.consent(3, "gamma", "run-1") == "gamma"
        assert not db.may_have_forgotten_consent


def test_what_another_node_s_lead_tells_of_commands_is_kept_and_ends_them_once(db: AgentDb) -> None:
    db.accept(command(), digest_of(command()), 1000.0)
    own = db.find(ID)
    assert own is not None
    db.keep_command(msgspec.structs.replace(own, state="applied", step=7, ended_at=1001.0, run="run-1"))
    db.keep_command(msgspec.structs.replace(own, state="failed", ended_at=1002.0))
    found = db.find(ID)
    assert found is not None and (found.state, found.step, found.ended_at, found.run) == ("applied", 7, 1001.0, "run-1")
    other = msgspec.structs.replace(own, id=command(2).id, run="run-1", received_at=2000.0)
    db.keep_command(other)
    assert [*db.commands_of("run-1", 1)] == [other]
    assert [row.id for row in db.open_commands()] == [other.id]


def branched(branch: str) -> m.LateEvent:
    return m.LateEvent("run-1", 1005.5, "anna", "info", 6, RunBranched("run-1", 6, branch, "forge"))


def test_each_lead_is_sent_its_own_until_it_has_taken_them(tmp_path: Path) -> None:
    with AgentDb(tmp_path / "agent.db") as db:
        waiting = LateEvents(db)
        for lead, branch in (("studio", "run-2"), ("studio", "run-3"), ("mbp", "run-4")):
            waiting.add(lead, branched(branch))
        assert waiting.for_lead("studio") == waiting.for_lead("studio") == (branched("run-2"), branched("run-3"))
        waiting.remove("studio", ["run-2", "run-4"])
        assert waiting.for_lead("studio") == (branched("run-3"),)
    with AgentDb(tmp_path / "agent.db") as db:
        waiting = LateEvents(db)
        assert waiting.for_lead("studio") == (branched("run-3"),)
        assert waiting.for_lead("mbp") == (branched("run-4"),), "only its own lead takes it"


def test_an_answer_has_the_oldest_of_many(tmp_path: Path) -> None:
    with AgentDb(tmp_path / "agent.db") as db:
        waiting = LateEvents(db)
        for number in range(MOST_EVENTS + 2):
            waiting.add("studio", branched(f"run-{number}"))
        assert [event.data.branch for event in waiting.for_lead("studio")] == [f"run-{n}" for n in range(MOST_EVENTS)]
        waiting.remove("studio", ["run-0", "run-1"])
        assert waiting.for_lead("studio")[-1] == branched(f"run-{MOST_EVENTS + 1}")
        db.late_events = '[{"lead": "studio", "event": {"run": 1}}]'  # of a later version
        assert LateEvents(db).for_lead("studio") == ()
