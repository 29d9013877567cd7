"""Tests of which agent is meant where none is named, the offer to start one, and a peer that is none."""

import fcntl
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from tests.tui.support.cli_calls import assert_one_line, call, call_json
from tests.tui.support.scripted import SNAPSHOT, scripted
from tests.tui.support.typist import DEADLINE_SECONDS, Typist
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.client.local_agents import registered, running
from trainctl.protocol.config import names
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.wire import codec
from trainctl.tui.cli import agent_call
from trainctl.tui.commands import targets
from trainctl.tui.commands.targets import on_this_machine
from trainctl.tui.setup import offers

NODES = ("tcp://127.0.0.1:11", "tcp://127.0.0.1:12", "tcp://127.0.0.1:13")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TRAINCTL_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.delenv("TRAINCTL_CONNECT", raising=False)
    return tmp_path / "state"


@pytest.fixture
def default(state: Path) -> str:
    """Where this state's agent would listen."""
    return names.agent_address(names.node_directory(names.node_name()))


def test_the_only_agent_or_cluster_here_is_meant(default: str) -> None:
    assert on_this_machine().addresses == (default,)
    with registered("torch-a", NODES[0], NODES):
        assert on_this_machine() == targets.Where((NODES[0],))


def test_of_several_the_person_has_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with registered("a", NODES[0]):
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with registered("b", NODES[1]), pytest.raises(InvalidInputError) as refusal:
            on_this_machine()
        for said in ("--connect: several agents run on this machine", f"a at {NODES[0]}", f"b at {NODES[1]}"):
            assert said in str(refusal.value)


def test_what_is_given_wins(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_call, "ANSWER_SECONDS", 0.2)
    nobody = "tcp://127.0.0.1:1"
    with registered("a", NODES[0]):
        assert_one_line(call("ls"), 5, f"no agent at {NODES[0]}: start one with trainctl-agent run", "trainctl demo")
        assert_one_line(call("ls", "--connect", nobody), 5, f"no agent at {nobody}: ")
        assert_one_line(call("ls", TRAINCTL_CONNECT=nobody), 5, f"no agent at {nobody}: ")
        (state.parent / "cluster.toml").write_text(f'[nodes.x]\naddress = "{nobody}"\n')
        assert_one_line(call("ls"), 5, f"no agent at {nobody}: ")


@pytest.fixture
def typist(state: Path) -> Iterator[Typist]:
    words = [sys.executable, "-m", "trainctl.tui.cli.main", "run", "--resume", "nobody"]
    yield Typist(words, TRAINCTL_STATE=str(state), TRAINCTL_CLUSTER=str(state.parent / "cluster.toml"))


def test_on_a_terminal_run_offers_to_start_an_agent_that_outlives_it(typist: Typist, default: str) -> None:
    typist.until(rf"No agent is running at {default}\. Start one on this machine\? \[Y/n\]")
    typist.type("\n")
    agent = psutil.Process(int(typist.until(r"stop it with: kill (\d+)")[1]))
    try:
        assert typist.ended() == 3, "it has no run of that name"
        assert agent.is_running() and os.getsid(agent.pid) != typist.pid, "in a session of its own"
        assert [[one.address for one in agents] for agents in running()] == [[default]]
        assert call("ls").returncode == 0
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(DEADLINE_SECONDS)


def test_who_does_not_want_one_is_told_what_to_do(typist: Typist, default: str) -> None:
    typist.until("Y/n")
    typist.type("n\n")
    typist.until(rf"no agent at {default}: start one with trainctl-agent run, or try trainctl demo")
    assert typist.ended() == 5
    assert running() == []


def test_without_a_terminal_nothing_is_asked_or_started(default: str, capsys: pytest.CaptureFixture[str]) -> None:
    offers.offer_agent(targets.Where((default,)), print)
    assert capsys.readouterr() == ("", "")
    assert running() == []


def test_an_agent_that_does_not_start_says_why() -> None:
    lock = names.node_directory(names.node_name()) / "agent.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(offers.RefusedError, match=r"didn't start: .*another agent of this .*started\.log"):
            offers.start_agent()


def test_an_agent_that_never_says_where_it_listens_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offers, "START_SECONDS", 0.2)
    log = names.node_directory(names.node_name()) / "logs" / "started.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log)  # to open it waits for a reader, so that nothing is started
    with pytest.raises(offers.RefusedError, match=rf"hasn't said .* for 0\.2 s: see {log}"):
        offers.start_agent()


RUNS: Any = examples.EXAMPLES["agent to client"]["runs"]
OTHER_REPLY: Any = examples.EXAMPLES["agent to client"]["history"]


def in_version_1(request: m.ClientRequest) -> bytes:
    return codec.encode(msgspec.structs.replace(RUNS, rid=request.rid)).replace(b"\xa1v\x02", b"\xa1v\x01")


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        (lambda request: [in_version_1(request)], "version", "protocol version 1 is not supported"),
        (lambda request: [b"\xc1\x00garbage"], "protocol", "not a msgpack message"),
        (lambda request: [OTHER_REPLY], "protocol", "expected Snapshot, received History"),
        (lambda request: [], "unreachable", "no answer from tcp://127.0.0.1:"),
    ],
    ids=["version", "garbage", "another reply", "silence"],
)
def test_a_peer_that_is_not_right_is_exit_code_5(
    monkeypatch: pytest.MonkeyPatch, answer: Any, code: str, says: str
) -> None:
    if code == "unreachable":
        monkeypatch.setattr(agent_call, "ANSWER_SECONDS", 0.2)
    with scripted(answer) as agent:
        assert_one_line(call("ls", "--connect", agent.address), 5, says)
        assert call_json("ls", "--connect", agent.address, status=5)["error"]["code"] == code


def test_the_right_answer_is_shown() -> None:
    idle = msgspec.structs.replace(SNAPSHOT, run=None)
    with scripted(lambda request: [RUNS if isinstance(request, m.RunsRequest) else idle]) as agent:
        assert "sft-1b-20261120-143107-9f3c  running  121/60,000" in call("ls", "--connect", agent.address).stdout
