"""Which agent is meant where none is named, and the offer to start one where none runs."""

import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.tui.support.cli_calls import assert_one_line, call
from tests.tui.support.typist import DEADLINE_SECONDS, Typist

from trainctl.protocol.config import names
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.local_agents import registered
from trainctl.protocol.record import paths
from trainctl.tui.cli import agent_call
from trainctl.tui.commands import targets
from trainctl.tui.commands.targets import on_this_machine
from trainctl.tui.setup import start_agent

NODES = ("tcp://127.0.0.1:11", "tcp://127.0.0.1:12", "tcp://127.0.0.1:13")
PROGRAM = (
    "import sys; from trainctl.tui.cli import main; from trainctl.tui.commands import targets; "
    "targets.DEFAULT_ADDRESS = sys.argv.pop(1); sys.exit(main.main())"
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("TRAINCTL_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.delenv("TRAINCTL_CONNECT", raising=False)
    return tmp_path / "state"


@pytest.fixture
def default() -> str:
    """An address where nothing listens, nor at the one after it."""
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with socket.create_server(("127.0.0.1", port + 1)):
                return f"tcp://127.0.0.1:{port}"


def test_the_only_agent_or_cluster_here_is_meant(default: str) -> None:
    assert on_this_machine(default).addresses == (default,)
    with registered("torch-a", NODES[0], NODES):
        assert on_this_machine(default) == targets.Where((NODES[0],))


def test_of_several_the_person_has_to_name_one(default: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with registered("a", NODES[0]):
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with registered("b", NODES[1]), pytest.raises(InvalidInputError) as refusal:
            on_this_machine(default)
        for said in ("--connect: several agents run on this machine", f"a at {NODES[0]}", f"b at {NODES[1]}"):
            assert said in str(refusal.value)


def test_one_that_listens_at_the_default_address_unregistered_counts_too() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, registered("a", NODES[0]):
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(InvalidInputError, match=rf"a at {NODES[0]}; another at {address}"):
            on_this_machine(address)
        assert on_this_machine(NODES[0]).addresses == (NODES[0],)


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
def typist(default: str, state: Path) -> Iterator[Typist]:
    words = [sys.executable, "-c", PROGRAM, default, "run", "--resume", "nobody"]
    yield Typist(words, TRAINCTL_STATE=str(state), TRAINCTL_CLUSTER=str(state.parent / "cluster.toml"))


def test_on_a_terminal_run_offers_to_start_an_agent_that_outlives_it(typist: Typist, default: str) -> None:
    typist.until(rf"No agent is running at {default}\. Start one on this machine\? \[Y/n\]")
    typist.type("\n")
    agent = psutil.Process(int(typist.until(r"stop it with: kill (\d+)")[1]))
    try:
        assert typist.ended() == 3, "it has no run of that name"
        assert agent.is_running() and os.getsid(agent.pid) == agent.pid, "in a session of its own"
        assert targets.listens(default)
        assert on_this_machine("tcp://127.0.0.1:1").addresses == (default,)
        assert call("ls").returncode == 0
    finally:
        agent.send_signal(signal.SIGTERM)
        agent.wait(DEADLINE_SECONDS)


def test_who_does_not_want_one_is_told_what_to_do(typist: Typist, default: str) -> None:
    typist.until("Y/n")
    typist.type("n\n")
    typist.until(rf"no agent at {default}: start one with trainctl-agent run, or try trainctl demo")
    assert typist.ended() == 5
    assert not targets.listens(default)


def test_without_a_terminal_nothing_is_asked_or_started(default: str, capsys: pytest.CaptureFixture[str]) -> None:
    start_agent.offer(targets.Where((default,)), default, print)
    assert capsys.readouterr() == ("", "")
    assert not targets.listens(default)


def test_an_agent_that_does_not_start_says_why(default: str) -> None:
    lock = paths.node_directory(names.node_name()) / "agent.lock"
    lock.parent.mkdir(parents=True)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(start_agent.RefusedError, match=r"didn't start: .*another agent of this .*started\.log"):
            start_agent.start(default)
