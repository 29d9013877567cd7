"""Agents of this machine as they register themselves: found while they live, and no longer."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainctl.protocol.client import local_agents
from trainctl.protocol.client.local_agents import registered, running

HOLD = """
import sys
from trainctl.protocol.client.local_agents import registered
with registered(sys.argv[1], sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    yield tmp_path / ".agents"


def hold(node: str, address: str) -> "subprocess.Popen[str]":
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD, node, address], text=True, **streams)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def addresses() -> list[list[str]]:
    return [[agent.address for agent in agents] for agents in running()]


def test_an_agent_is_found_as_long_as_it_is_registered(folder: Path) -> None:
    assert running() == []
    with registered("a", "tcp://127.0.0.1:1"), hold("b", "tcp://127.0.0.1:2") as other:
        ((one,), (two,)) = sorted(running(), key=lambda agents: agents[0].node)
        assert (one.node, one.address, two.node, two.pid) == ("a", "tcp://127.0.0.1:1", "b", other.pid)
        other.communicate()
        assert addresses() == [["tcp://127.0.0.1:1"]]
    assert running() == [] and list(folder.iterdir()) == []


def test_a_file_that_is_gone_is_written_again_with_the_agent_s_address_of_now(folder: Path) -> None:
    with registered("a", "ipc:///run/a.sock") as registration:
        for path in folder.glob("*.json"):
            path.unlink()
        registration.look("ipc:///run/a.sock", "")
        assert addresses() == [["ipc:///run/a.sock"]]
        registration.look("ipc:///tmp/a.sock", "/tmp/guests.sock")
        assert addresses() == [["ipc:///tmp/a.sock"]]
    assert running() == [] and list(folder.iterdir()) == []


def test_a_killed_one_s_file_counts_for_nothing_and_goes_with_the_next(folder: Path) -> None:
    with hold("b", "tcp://127.0.0.1:2") as other:
        other.send_signal(signal.SIGKILL)
        other.communicate()
    assert len(list(folder.glob("*.json"))) == 1
    assert running() == []
    with registered("a", "tcp://127.0.0.1:1"):
        assert len(list(folder.glob("*.json"))) == 1
        assert addresses() == [["tcp://127.0.0.1:1"]]


def test_agents_of_one_cluster_stand_together_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [f"tcp://127.0.0.1:{port}" for port in (7, 8, 9)]
    with registered("c", nodes[2], nodes):
        monkeypatch.setattr(local_agents.os, "getpid", lambda: 1)
        with registered("a", nodes[0], nodes):
            assert addresses() == [[nodes[0], nodes[2]]]


def test_neither_another_machine_s_agent_in_a_shared_home_nor_one_without_a_file_is_here(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.touch()
    with registered("a", "tcp://127.0.0.1:1"):
        assert running() == []
    folder.unlink()
    with registered("a", "tcp://127.0.0.1:1"):
        monkeypatch.setattr(local_agents.socket, "gethostname", lambda: "elsewhere")
        assert running() == []
