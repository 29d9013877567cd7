"""Ranks of other nodes' runs: whether they are hosted, what they obey, and the answers to whoever greets as a lead."""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from tests.cluster.greeter import LEAD, Greeter
from tests.cluster.in_process import BlockingCluster
from tests.cluster.run_files import on
from tests.node_agent.support.records import plan
from tests.node_agent.support.simulation import config
from tests.waiting import until

from trainctl.node_agent.records import run_folders
from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.records.keys import HANDED_OVER_KEY
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.roles.rank_hosting import RankHosting
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import preflight
from trainctl.node_agent.trainers.rank_ports import Look
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths, runs_directory

ORDER = m.PeerHost(
    link="l", seq=1, run="run-1", rank=1, config=run_file.to_dict(config(nodes={"a": {}, "b": {}})),
    generation=m.Generation(1, 0),
)  # fmt: skip


@pytest.mark.parametrize("run", [None, "run-0"])
async def test_not_while_a_run_is_being_started(run: str | None) -> None:
    context: Any = SimpleNamespace(node="a", db=None)
    role = AgentRole()
    role.start(run)
    field, problem = await RankHosting(context, role).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", f"leads {run or 'a run that is starting'}; one run at a time")


async def test_nor_if_one_is_started_while_the_rank_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = SimpleNamespace(node="a", db=None, placement=None)
    role, loop = AgentRole(), asyncio.get_running_loop()

    def check(*_: object, **__: object) -> None:
        """An operator is quicker."""
        loop.call_soon_threadsafe(role.start)

    monkeypatch.setattr(preflight, "check_on", check)
    field, problem = await RankHosting(context, role).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", "leads a run that is starting; one run at a time")


async def test_a_directory_that_an_agent_was_making_as_it_died_is_removed_by_the_next(tmp_path, monkeypatch):
    """The disk is as it was at two moments: while the directory is made, and while it is removed again."""
    runs, left = runs_directory(tmp_path / "node"), []

    def killed(*_: object) -> None:
        left.append(shutil.copytree(runs, tmp_path / f"left-{len(left)}"))

    def full(*given: object) -> None:
        killed()
        raise RefusedError("the disk is full")

    db = empty_db()
    db.add_run, db.forget_run = full, killed
    context: Any = SimpleNamespace(node="a", db=db, placement=None, directory=tmp_path / "node")
    monkeypatch.setattr(preflight, "check_on", lambda *_, **__: None)
    field, problem = await RankHosting(context, AgentRole()).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", "the disk is full")
    assert [*runs.iterdir()] == []
    assert [(folder / "run-1" / "record.db").exists() for folder in left] == [True, True]
    for folder in left:
        run_folders.remove_unstarted(folder, lambda run: False)
        assert [*folder.iterdir()] == []


def empty_db() -> Any:
    """An agent's database that knows no run."""
    return SimpleNamespace(
        known_run=lambda run: None, followed=lambda run: None, consented_term=lambda run: 0, saw=lambda seen: None,
        forget_run=lambda run: None,
    )  # fmt: skip


@pytest.mark.parametrize("is_there", [False, True])
async def test_a_record_that_cannot_be_read_is_a_refusal_that_removes_only_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    """Checkpoints may be there without a row: a folder was copied, or the agent's database was lost."""
    opened: list[RunDb] = []

    read = RunDb.meta

    def malformed(recorder: RunDb, key: str) -> str | None:
        if key != HANDED_OVER_KEY:
            return read(recorder, key)
        opened.append(recorder)
        raise InvalidInputError("record.db", "cannot be read: database disk image is malformed")

    weights = RunPaths(runs_directory(tmp_path / "node") / "run-1").checkpoint(100) / "model.safetensors"
    if is_there:
        weights.parent.mkdir(parents=True)
        weights.touch()
    context: Any = SimpleNamespace(node="a", db=empty_db(), placement=None, directory=tmp_path / "node")
    monkeypatch.setattr(preflight, "check_on", lambda *_, **__: None)
    with monkeypatch.context() as patched:
        patched.setattr(RunDb, "meta", malformed)
        field, problem = await RankHosting(context, AgentRole()).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", "record.db: cannot be read: database disk image is malformed")
    with pytest.raises(InvalidInputError, match="closed"):
        opened[0].meta("handed-over")
    assert weights.exists() == is_there
    assert {path.name for path in runs_directory(tmp_path / "node").iterdir()} == ({"run-1"} if is_there else set())


class Port:
    """A trainer that takes every order."""

    def __init__(self) -> None:
        self.orders: list[m.ToTrainer] = []

    async def tell(self, order: m.ToTrainer) -> bool:
        self.orders.append(order)
        return True

    def look(self) -> Look:
        return Look()


@pytest.mark.parametrize(("recorded", "is_obeyed"), [(True, True), (False, False), (None, False)])
def test_a_late_word_on_the_lead_s_record_is_no_order_of_a_replaced_lead(tmp_path, recorded, is_obeyed):
    """It is dropped; the trainer has given up waiting for it."""
    paths, port = RunPaths(tmp_path / "run-1"), Port()
    paths.directory.mkdir()
    with RunDb(paths, resumable=False) as recorder:
        context: Any = SimpleNamespace(
            node="b", supervisor=SimpleNamespace(is_simulated=False), rank=lambda paths, rank: port
        )
        followed = FollowedRank(context, FollowedRun("run-1", 1, "a", "x:1"), config(), paths, recorder)
        followed.see(m.Generation(1, 3))
        late = msgspec.structs.replace(plan(7, m.Generation(1, 2)), kind="checkpoint", recorded=recorded)
        assert asyncio.run(followed.obey(late)) is is_obeyed
    assert port.orders == []


RUN = "raw-20260101-000000-0000"


@pytest.fixture
def greeter(cluster: BlockingCluster) -> Iterator[Callable[[str], Greeter]]:
    context, made = zmq.Context(), []

    def make(link: str) -> Greeter:
        made.append(Greeter(context, cluster["gamma"].address, link * 16))
        return made[-1]

    yield make
    for one in made:
        one.socket.close(linger=0)
    context.term()


def test_whoever_is_not_known_or_missed_a_number_is_told_to_begin_again(greeter):
    lead = greeter("a")
    lead.say(m.PeerPing(link=lead.link, seq=0))
    assert lead.hear(m.PeerRefusal).code == "unknown-link"
    lead.greet()
    assert lead.hear(m.PeerWelcome).node == "gamma"
    lead.say(m.PeerPing(link=lead.link, seq=0))
    assert lead.hear(m.PeerBeat).seq == 0
    for seq in (3, 0):
        lead.say(m.PeerPing(link=lead.link, seq=seq))
        assert lead.hear(m.PeerRefusal).code == "unknown-link"


def test_a_newer_greeting_takes_the_place_of_an_older_one(greeter):
    first, second = greeter("a"), greeter("b")
    for one in (first, second):
        one.greet()
        one.hear(m.PeerWelcome)
    first.say(m.PeerPing(link=first.link, seq=0))
    assert first.hear(m.PeerRefusal).code == "unknown-link"
    second.say(m.PeerPing(link=second.link, seq=0))
    assert second.hear(m.PeerBeat).seq == 0


def test_orders_for_what_is_not_hosted_and_of_a_generation_that_was_left_are_refused(cluster, greeter, run_config):
    lead = greeter("a")
    lead.greet()
    lead.hear(m.PeerWelcome)
    lead.relay(1, m.Fence(run=RUN, generation=m.Generation(1, 1)))
    assert lead.hear(m.PeerRefusal).code == "busy"
    lead.say(m.PeerEnd(link=lead.link, seq=2, run=RUN, rank=1, state="stopping"))
    assert lead.hear(m.PeerExit).why == "is no longer known to its agent"
    config = run_config(nodes=on("alpha", "gamma"))
    for seq, (run, field) in enumerate((("../../etc", "run"), (RUN, "")), 3):
        lead.say(m.PeerHost(link=lead.link, seq=seq, run=run, rank=1, config=config, generation=m.Generation(1, 0)))
        assert lead.hear(m.PeerHosted).field == field
    assert cluster.run_paths("gamma", RUN).run_file.is_file()
    lead.relay(5, m.Fence(run=RUN, generation=m.Generation(1, 5)))
    lead.relay(6, m.Fence(run=RUN, generation=m.Generation(1, 4)))
    refused = until(lead.next_refusal, 20, "a refusal")
    assert (refused.code, "g1.5" in refused.text) == ("older-term", True)
    older, again = greeter("b"), greeter("c")
    older.greet(RUN, term=0)
    assert older.hear(m.PeerRefusal).code == "older-term"
    again.greet(RUN)
    assert [(hosted.run, hosted.rank) for hosted in again.hear(m.PeerWelcome).ranks] == [(RUN, 1)]
    view = cluster.view("gamma")
    assert (view.run, view.lead, view.generation) == (RUN, LEAD, m.Generation(1, 5))
    again.say(m.PeerEnd(link=again.link, seq=1, run=RUN, rank=1, state="starting"))
    until(lambda: not cluster.run_paths("gamma", RUN).directory.exists(), 20, "the end of a run that never began")
    with cluster.client("gamma") as client:
        assert RUN not in [known.run for known in client.ask(m.RunsRequest).runs]


def test_a_message_lost_late_in_a_run_costs_a_greeting_and_not_the_trainer(cluster, greeter, run_config):
    """However long the run has been going, the silence that ends its trainer is counted from the lead's last word."""
    lead, again = greeter("a"), greeter("b")
    silence_seconds = 2.0
    config = run_config(run__orphan_seconds=silence_seconds, nodes=on("alpha", "gamma"))
    lead.greet()
    lead.hear(m.PeerWelcome)
    lead.say(m.PeerHost(link=lead.link, seq=1, run=RUN, rank=1, config=config, generation=m.Generation(1, 0)))
    assert lead.hear(m.PeerHosted).problem == ""
    (trainer,) = cluster["gamma"].trainers
    until(lambda: pinged(lead) and time.time() - trainer.started_at > silence_seconds, what="an old run")
    lead.say(m.PeerPing(link=lead.link, seq=3))
    assert until(lead.next_refusal, 20, "a refusal").code == "unknown-link"
    again.greet(RUN)
    (hosted,) = again.hear(m.PeerWelcome).ranks
    assert (hosted.run, hosted.pid) == (RUN, trainer.pid)
    again.say(m.PeerEnd(link=again.link, seq=1, run=RUN, rank=1, state="starting"))
    until(lambda: not trainer.is_alive, what="the trainer's end")


def pinged(lead: Greeter) -> bool:
    lead.say(m.PeerPing(link=lead.link, seq=1))
    return True
