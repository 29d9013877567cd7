"""Agents to be flooded, narrowed to few descriptors, and what their other clients notice meanwhile."""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from tests.conftest import SHARED_PIDS
from tests.integration.conftest import AgentProcess
from tests.integration.support.ports import free_addresses
from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file
from trainctl.protocol.config.names import runtime_directory
from trainctl.protocol.messages import FactsRequest, RunsRequest, SnapshotRequest
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder

DESCRIPTORS = 256


class Narrow(AgentProcess):
    """An agent that may have 256 files open, and where its sockets are."""

    def narrow(self) -> "Narrow":
        assert self.process is not None
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
        return self

    def socket(self, name: str) -> str:
        if name == "trainers":
            return f"ipc://{runtime_directory(self.directory)}/trainers.sock"
        assert self.live_address is not None
        return self.live_address if name == "live" else self.address

    @property
    def megabytes(self) -> float:
        assert self.process is not None
        return psutil.Process(self.process.pid).memory_info().rss / 1e6

    @property
    def peak_megabytes(self) -> float:
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text("ascii")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1000


def warmed(agent: Narrow) -> Iterator[Narrow]:
    """A started agent, narrowed once what it needs for answers is loaded, and ended after the tests that share it."""
    assert agent.process is not None
    SHARED_PIDS.add(agent.process.pid)
    with agent.client() as client:
        for _ in range(100):
            client.ask(SnapshotRequest, 0)
        for _ in range(3):
            client.ask(FactsRequest)  # loads what nothing else does
    yield agent.narrow()
    agent.clean_up()


class Keyed(Narrow):
    """One that serves who has a key alone."""

    def __init__(self, folder: Path) -> None:
        held = self.keys = KeyFolder(folder / "keys")
        held.make("box")
        (address,) = free_addresses(1)
        file = folder / "cluster.toml"
        file.write_text(f'[nodes.box]\naddress = "{address}"\nkey = "{held.agent().public}"\n')
        super().__init__(folder / "state", "box", file)
        self._folder = folder
        self._ring = Keyring(held, cluster_file.read(file))

    def client(self, **options: Any) -> BlockingClient:
        return super().client(keys=self._ring, **options)

    def session_of(self, role: Any) -> tuple[str, str]:
        """A folder with a key of such a role, and the agent's public key: what a flooder takes."""
        person = KeyFolder(self._folder / role)
        if not person.has("user"):
            person.make(role)
            self.keys.authorize("studio" if role == "node" else role, person.user().public, role)
        return str(person.path), self.keys.agent().public


def answers(client: BlockingClient, seconds: float = 30.0) -> float:
    """Return how long an answer takes, which comes even if it has to be asked for again."""
    begun = time.perf_counter()
    until(lambda: _runs(client), seconds, "an answer")
    return time.perf_counter() - begun


def _runs(client: BlockingClient) -> bool:
    client.ask(RunsRequest)
    return True


class Flooded(NamedTuple):
    """A flood, and its effects."""

    told: dict[str, int]  # by the flooder
    answered_seconds: list[float]  # how long a valid client waited, each time, shortest first
    growth_megabytes: float

    @property
    def p99_seconds(self) -> float:
        return self.answered_seconds[int(len(self.answered_seconds) * 0.99)]

    def __str__(self) -> str:
        p50, count = self.answered_seconds[len(self.answered_seconds) // 2], len(self.answered_seconds)
        times = f"p50 {1000 * p50:.1f} ms, p99 {1000 * self.p99_seconds:.1f} ms, memory {self.growth_megabytes:+.1f} MB"
        return f"{self.told}, {count} answers, {times}"


def flood(agent: Narrow, *arguments: str) -> Flooded:
    """Flood an agent, as `tests.integration.support.flooder` does, and ask it all the while."""
    with agent.client() as client:
        answers(client)
        before, seconds = agent.megabytes, []
        command = [sys.executable, "-m", "tests.integration.support.flooder", *arguments]
        flooder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
        try:
            while flooder.poll() is None:
                seconds.append(answers(client))
                time.sleep(0.005)
            assert flooder.stdout is not None
            told = json.loads(flooder.stdout.read())
        finally:
            flooder.kill()
            flooder.wait()
            if flooder.stdout is not None:
                flooder.stdout.close()
        answers(client)
    agent.check()
    return Flooded(told, sorted(seconds), agent.megabytes - before)
