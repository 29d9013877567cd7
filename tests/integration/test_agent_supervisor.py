"""Agents under a supervisor or a service manager: killed ones start again where they were; their trainers live on."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import stat
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.asking import run_of
from tests.cluster.run_files import FOREVER, NODE, NODES, on
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.conftest import SHARED_PIDS
from tests.integration.conftest import AgentProcess, keep_processes
from tests.integration.support.clusters import Cluster
from tests.node_agent.support.processes import ENVIRONMENT
from tests.tiers import scale
from tests.waiting import HANG_SECONDS, slowness, until

from trainctl.node_agent.__main__ import STEADY_SECONDS
from trainctl.node_agent.services import managed_service as service
from trainctl.protocol.client import BlockingClient
from trainctl.protocol.config.names import node_directory
from trainctl.protocol.messages import FactsRequest
from trainctl.protocol.record.reader import RecordReader

KILLS = scale("lead agent kills")
NEXT_STEP_SECONDS = 3.0


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path / "state", supervised=True)
    yield process
    process.clean_up()


def agent_of(process: "subprocess.Popen[str] | None") -> psutil.Process:
    """The agent that a supervisor runs now."""
    assert process is not None

    def find() -> psutil.Process | None:
        return next((child for child in psutil.Process(process.pid).children() if child.is_running()), None)

    found: psutil.Process = until(find, what="the supervisor's agent")
    return found


@pytest.mark.tier("test")
def test_a_detached_agent_outlives_its_terminal(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trainctl.node_agent", "run", "--name", "studio", "--state", tmp_path, "--detach"]
    started = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANG_SECONDS)
    supervisor = psutil.Process(json.loads(started.stdout)["pid"])
    (agent,) = supervisor.children()
    log = node_directory("studio", tmp_path) / "logs" / "started.log"
    try:
        assert os.getsid(agent.pid) == os.getsid(supervisor.pid) == supervisor.pid
        with BlockingClient(json.loads(started.stdout)["listen"]) as client:
            assert client.ask(FactsRequest).node == "studio"
            agent.kill()
            until(lambda: "starting it again" in log.read_text(), what="the supervisor to notice")
            until(lambda: supervisor.children() not in ([], [agent]), what="the next agent")
            assert client.ask(FactsRequest).node == "studio"
        again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=HANG_SECONDS)
        assert (again.returncode, again.stdout) == (2, "")
        assert "another agent of this node is running" in again.stderr
        assert "starting it again" not in again.stderr, "what an agent before it printed"
        assert "starting it again" in log.read_text()
    finally:
        supervisor.terminate()
        assert psutil.wait_procs([agent, supervisor], timeout=HANG_SECONDS)[1] == []


@pytest.mark.tier("test")
def test_a_killed_agent_is_started_again_where_it_was_and_sigterm_ends_both(supervised: AgentProcess) -> None:
    process = supervised.start().process
    assert process is not None and process.stdout is not None
    supervisor, agent = psutil.Process(process.pid), agent_of(process)
    assert supervisor.cmdline()[0].strip() == f"trainctl: agent supervisor of {supervised.name}"
    assert supervisor.net_connections() == []
    agent.kill()
    again = json.loads(process.stdout.readline())
    assert (again["listen"], again["live"]) == (supervised.address, supervised.live_address)
    assert again["pid"] != agent.pid
    with supervised.client() as client:
        assert run_of(client) is None
    assert supervised.terminate() == 0
    assert not psutil.pid_exists(again["pid"])


def test_an_agent_that_was_asked_to_end_is_not_started_again(supervised: AgentProcess) -> None:
    process = supervised.start().process
    agent_of(process).terminate()
    assert process is not None and process.wait(HANG_SECONDS) == 0


def test_a_signal_to_the_whole_group_reaches_the_agent_once(tmp_path: Path, run_config) -> None:
    """A second SIGTERM would end the agent before its rank has left."""
    agent = AgentProcess(tmp_path / "state", options=["--drain-on-term", "--grace", "3600"], supervised=True).start()
    with agent.client() as client:
        started = client.send("start-run", {"config": run_config(run__steps=FOREVER)})
        step = wait_for_step(client, 3).run.step  # type: ignore[union-attr]
    assert agent.process is not None and started.run is not None
    assert os.getpgid(agent_of(agent.process).pid) != os.getpgid(agent.process.pid)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.process.wait(HANG_SECONDS) == 0
    saved = [int(path.name.removeprefix("step-")) for path in agent.run_paths(started.run).checkpoints.iterdir()]
    assert max(saved) >= step
    agent.clean_up()


def test_an_agent_that_cannot_start_is_not_tried_again(supervised: AgentProcess, tmp_path: Path) -> None:
    supervised.start()
    other = AgentProcess(tmp_path / "other", supervised=True)
    other.address = supervised.address
    with pytest.raises(AssertionError, match=r"trainctl-agent: .* in use"):
        other.start()
    assert other.process is not None and other.process.wait(HANG_SECONDS) == 2
    other.kill()


@pytest.mark.timeout(3600)
def test_after_kill_9_of_the_lead_s_agent_the_next_step_comes_within_three_seconds(tmp_path: Path, run_config) -> None:
    cluster = Cluster(tmp_path, supervised=True)
    try:
        config = run_config(run__steps=FOREVER, nodes=on(*NODES), group={"first_shares": "even"})
        with cluster.client() as client:
            run = client.send("start-run", {"config": config}).run
            wait_for_step(client, 3)
        assert run is not None
        trainers = cluster.trainers()
        waits = [wait_after_kill(cluster, run) for _ in range(KILLS)]
        assert cluster.trainers() == trainers
        with cluster.client() as client:
            client.send("stop", {"checkpoint": False})
            assert wait_for_end(client).state == "stopped"
        with RecordReader(cluster.run_paths(NODES[0], run)) as reader:
            steps = [row.step for row in reader.steps(limit=100_000)[0]]
        assert steps == [*range(1, len(steps) + 1)]
    finally:
        cluster.stop()
    print(f"\n{KILLS} kills: median {statistics.median(waits):.2f} s, worst {max(waits):.2f} s, load {slowness():.1f}")
    assert max(waits) <= NEXT_STEP_SECONDS * slowness()


def wait_after_kill(cluster: Cluster, run: str) -> float:
    """Kill the lead's agent. Return the seconds until the first step that was planned by the next one."""
    agent = agent_of(cluster[NODES[0]].process)
    # Its successor comes at once. Linux counts the seconds since its start from a whole second.
    time.sleep(max(0.0, agent.create_time() + STEADY_SECONDS + 1.0 - time.time()))
    at = time.time()
    agent.kill()
    agent.wait()
    with RecordReader(cluster.run_paths(NODES[0], run)) as reader:
        last = reader.last_step()
        assert last is not None

        def later() -> list[float]:
            rows, _ = reader.steps(last.step - 1)
            return [row.committed_at for row in rows if row.generation > last.generation]

        first = min(until(later, what="a step after the kill"))
    with cluster.client() as client:
        wait_for_step(client, last.step + 3)
    SHARED_PIDS.add(agent_of(cluster[NODES[0]].process).pid)
    keep_processes()
    return first - at


STALL_SECONDS = 7


class Unit(AgentProcess):
    """An agent as systemd would run it; this test is the service manager."""

    def __init__(self, folder: Path, supervisor: socket.socket) -> None:
        super().__init__(folder)
        self._supervisor = supervisor

    def start(self) -> "Unit":
        """Start, or start again on the same ports, as ExecStart, Environment, UMask and the rest have it."""
        words = (
            *service.own_command(),
            "run",
            "--name",
            self.name,
            "--state",
            str(self.state),
            "--listen",
            self.address,
        )
        words += ("--no-keys", "--exit-if-stalled", str(STALL_SECONDS))
        unit = service.unit(service.Service(words, "system", "root", self.directory / "logs")).decode()
        (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
        given = dict(
            shlex.split(line)[0].split("=", 1) for line in re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
        )
        told = {
            "NOTIFY_SOCKET": self._supervisor.getsockname(),
            "WATCHDOG_USEC": "2000000",
            "TRAINCTL_ALLOWED_VARIABLES": "MINE",
        }
        self.process = subprocess.Popen(
            shlex.split(command), env={**ENVIRONMENT, **given, **told}, cwd="/", umask=0o077, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.address, self.live_address = said["listen"], said["live"]
        return self

    def heard(self) -> list[str]:
        """Return what the supervisor has received since the last time."""
        found: list[str] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                found += self._supervisor.recv(4096).decode().splitlines()
        return found

    def wait_for_word(self, word: str) -> None:
        until(lambda: word in self.heard(), what=word)


@pytest.fixture
def unit(tmp_path: Path) -> Iterator[Unit]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
        supervisor.bind(str(tmp_path / "notify"))
        supervisor.setblocking(False)
        made = Unit(tmp_path / "state", supervisor).start()
        yield made
        made.clean_up()


def test_a_trainer_lives_through_restarts_and_kills_of_its_agents_service(unit: Unit, run_config: Any) -> None:
    unit.wait_for_word("READY=1")
    nice = min(os.getpriority(os.PRIO_PROCESS, 0) + 1, 19)
    nodes = {NODE: {"backend": "mlx", "device": "cpu", "threads": 1, "priority": nice, "env": {"MINE": "ü $x"}}}
    with unit.client() as client:
        client.send("start-run", {"config": run_config(run__steps=1_000_000, nodes=nodes)}, wait="accepted")
        run = wait_for_step(client, 3, 150).run.run
        (pid,) = unit.trainer_pids()
        trainer = psutil.Process(pid)
        assert trainer.nice() == psutil.Process(trainer.ppid()).nice() == nice
        environment = trainer.environ()
        assert environment["MINE"] == "ü $x" and "NOTIFY_SOCKET" not in environment
        assert stat.S_IMODE(unit.run_paths(run).log(0).stat().st_mode) == 0o600
        unit.wait_for_word(f"STATUS=box at {unit.address}: conducts {run} (running)")
        unit.wait_for_word("WATCHDOG=1")

        # systemctl restart, with KillMode=process: only the main process gets the signal.
        unit.heard()
        assert unit.terminate() == 0
        assert unit.heard()[-1] == "STOPPING=1"
        unit.start()
        step = until(lambda: run_of(client)).step
        wait_for_step(client, step + 3)
        assert unit.trainer_pids() == [pid]

        unit.kill()
        unit.start()
        step = until(lambda: run_of(client)).step
        wait_for_step(client, step + 3)
        assert unit.trainer_pids() == [pid]
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
