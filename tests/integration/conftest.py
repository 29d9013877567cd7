"""Real agents, trainers and models for the tests of the whole line, each ended with its test."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.asking import run_of
from tests.cluster.run_files import NODE
from tests.cluster.waits import PatientClient, wait_for_end, wait_for_step
from tests.conftest import SHARED_PIDS, our_processes
from tests.integration.support.ports import free_addresses
from tests.waiting import HANG_SECONDS, Patience, until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.machine import shim
from trainctl.protocol.record.paths import RunPaths

EXIT_SECONDS = 10.0
"""Seconds that a trainer that was asked to leave may take over it."""


class AgentProcess:
    """One agent on free loopback ports, or where a cluster file has it, in a node folder of its own."""

    def __init__(
        self, folder: Path, name: str = NODE, cluster: Path | None = None, keys: Path | None = None,
        environment: Mapping[str, str] | None = None, options: Sequence[str] = (), *, supervised: bool = False,
    ) -> None:  # fmt: skip
        """`keys`: a folder of keys that the agent is to use, on loopback too. `environment`: beside the test's own.
        `options`: further ones of `trainctl-agent run`. `supervised`: `process` is then that of its supervisor."""
        self.options, self.python = options, sys.executable
        self._module = "trainctl.node_agent" if supervised else "trainctl.node_agent.cli"
        self._environment = {**(environment or {}), **({"TRAINCTL_KEYS": str(keys)} if keys is not None else {})}
        self.state, self.name, self._cluster, self._keys = folder, name, cluster, keys
        # Not port 0: while the agent is down, another process could be given a port that the system has chosen.
        self.address = free_addresses(1)[0] if cluster is None else ""
        self.live_address: str | None = None  # the port after it, which is free too
        self.metrics_url = ""
        self.process: subprocess.Popen[str] | None = None
        self.lasting = ""  # the id of the run that `live` shares: the folder may have others

    @property
    def directory(self) -> Path:
        return self.state / self.name

    @property
    def _uses_keys(self) -> bool:
        return self._keys is not None or (self._cluster is not None and "key = " in self._cluster.read_text())

    def start(self) -> "AgentProcess":
        """Start, or start again on the same ports."""
        command = [self.python, "-m", self._module, "run", "--name", self.name]
        command += ["--listen", self.address] if self._cluster is None else ["--cluster", str(self._cluster)]
        if self.live_address is not None:
            command += ["--live", self.live_address]
        command += [] if self._uses_keys or self.python != sys.executable else ["--no-keys"]  # which 0.2.0 has not
        command += self.options
        env = {**os.environ, **self._environment}
        self.process = subprocess.Popen(
            [*command, "--state", str(self.state)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        said = json.loads(line)
        self.address, self.live_address, self.metrics_url = said["listen"], said["live"], said.get("metrics") or ""
        return self

    def client(self, **options: Any) -> BlockingClient:
        return PatientClient(self.address, **{"by": "tester", "timeout_seconds": HANG_SECONDS, **options})

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._reap()

    def terminate(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        status = self.process.wait(HANG_SECONDS)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        return status

    def run_paths(self, run: str) -> RunPaths:
        return RunPaths(self.directory / "runs" / run)

    def trainer_pids(self) -> list[int]:
        """Live trainer processes that this agent's runs name, and the worker of separate work."""
        found = []
        for file in (
            file for kind in ("runs", "work") for file in self.directory.glob(f"{kind}/*/rank-*.process.json")
        ):
            known = json.loads(file.read_text())
            if (known["boot_id"], known["start_time"]) == (shim.boot_id(), shim.start_time(known["pid"])):
                found.append(known["pid"])
        return found

    def clean_up(self) -> None:
        """End what is left. A trainer that outlives its run is a failure: no test here leaves one on purpose."""
        status, said = self._end()
        patience = Patience(EXIT_SECONDS)
        while (left := self.trainer_pids()) and not patience.is_over():
            time.sleep(0.05)
        for pid in left:
            with contextlib.suppress(psutil.Error):
                psutil.Process(pid).send_signal(signal.SIGKILL)
        assert status == 0, said
        assert left == [], "trainers outlived their runs"

    def check(self) -> None:
        """Fail with what the agent said if it has ended by itself."""
        if self.process is not None and self.process.poll() is not None:
            status, said = self._end()
            assert status == 0, said

    def _end(self) -> tuple[int, str]:
        """Return how the agent ends now, or has ended by itself, and then what it said; 0 for one that a test has
        ended."""
        process = self.process
        if process is None or process.stderr is None or process.stderr.closed:
            return 0, ""
        if process.poll() is None:
            return self.terminate(), ""
        said = process.stderr.read()
        return self._reap(), said


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path / "state").start()
    yield process
    process.clean_up()


@pytest.fixture(scope="session")
def lasting_run(tmp_path_factory: pytest.TempPathFactory, run_config: Any) -> Iterator[AgentProcess]:
    """An agent with a run of small steps that goes on and on, and is paused while no test uses it; use `live`."""
    process = AgentProcess(tmp_path_factory.mktemp("lasting") / "state").start()
    with process.client() as client:
        client.send("start-run", {"config": run_config(run__steps=1_000_000)}, wait="accepted")
        run = wait_for_step(client, 3).run
        assert run is not None
        process.lasting = run.run
        assert client.send("pause", {}).state == "applied"
    keep_processes()
    yield process
    with process.client() as client:
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    process.clean_up()


@pytest.fixture
def live(lasting_run: AgentProcess) -> Iterator[AgentProcess]:
    """An agent and its run, which a test shares with others and leaves running with the micro-batch that it had."""
    keep_processes()
    with lasting_run.client() as client:
        client.send("resize-batch", {"micro": 4})
        assert client.send("resume", {}).state == "applied"
        yield lasting_run
        lasting_run.check()
        until(lambda: run_of(client).state == "running", what="the run that goes on")  # type: ignore[union-attr]
        assert client.send("pause", {}).state == "applied"
    keep_processes()


def keep_processes() -> None:
    """Let the processes that run now outlive this test: a run that tests share, and the reducers it has made
    meanwhile."""
    SHARED_PIDS.update(our_processes(set()))


@pytest.fixture(scope="module")
def three_agents(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A cluster of three agents that the tests of a module share; use `cluster`. Kept for all modules, idle agents of
    every worker would take more CPU time than starting them does."""
    from tests.integration.support.clusters import Cluster

    made = Cluster(tmp_path_factory.mktemp("cluster"))
    yield made
    made.stop()


@pytest.fixture
def cluster(three_agents: Any) -> Iterator[Any]:
    """The three agents of `tests.integration.support.clusters`, in touch with each other and without a run."""
    three_agents.in_touch()
    yield three_agents
    three_agents.settle()
