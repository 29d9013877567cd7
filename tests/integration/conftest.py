"""Real agents, trainers and models for the tests of the whole line, each ended with its test."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.conftest import SHARED_PIDS, our_processes
from tests.integration.support.ports import free_addresses
from tests.waiting import HANG_SECONDS, Patience, until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.machine import shim
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer import demo_assets

STEP_SECONDS_LIMIT = 60.0
EXIT_SECONDS = 10.0
"""How long a trainer that was asked to leave may take over it."""
NODE = "box"


class PatientClient(BlockingClient):
    """Waits for outcomes for as long as a busy machine may take."""

    def send(self, verb: str, args: dict[str, Any], **options: Any) -> m.CommandReply:
        return super().send(verb, args, **{"timeout_seconds": HANG_SECONDS, **options})


class AgentProcess:
    """One agent on free loopback ports, or where a cluster file has it, in a node folder of its own."""

    def __init__(
        self, folder: Path, name: str = NODE, cluster: Path | None = None, keys: Path | None = None,
        environment: Mapping[str, str] | None = None, options: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """`keys`: a folder of keys that the agent is to use, on loopback too. `environment`: beside the test's own.
        `options`: further ones of `trainctl-agent run`."""
        self.options, self.python = options, sys.executable
        self._environment = {**(environment or {}), **({"TRAINCTL_KEYS": str(keys)} if keys is not None else {})}
        self.state, self.name, self._cluster, self._keys = folder, name, cluster, keys
        # Not port 0: while the agent is down, another process could be given a port that the system has chosen.
        self.address = free_addresses(1)[0] if cluster is None else ""
        self.live_address: str | None = None  # the port after it, which is free too
        self.process: subprocess.Popen[str] | None = None
        self.lasting = ""  # the id of the run that `live` shares: the folder may have others

    @property
    def directory(self) -> Path:
        return self.state / self.name

    def start(self) -> "AgentProcess":
        """Start, or start again on the same ports."""
        command = [self.python, "-m", "trainctl.node_agent.cli", "run", "--name", self.name]
        command += ["--listen", self.address] if self._cluster is None else ["--cluster", str(self._cluster)]
        if self.live_address is not None:
            command += ["--live", self.live_address]
        command += ["--keys", "require"] if self._keys is not None else []
        command += self.options
        env = {**os.environ, **self._environment}
        self.process = subprocess.Popen(
            [*command, "--state", str(self.state)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        said = json.loads(line)
        self.address, self.live_address = said["listen"], said["live"]
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
        """How the agent ends now, or has ended by itself, and then what it said; 0 for one that a test has ended."""
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
        until(lambda: client.snapshot(0).run.state == "running", what="the run that goes on")  # type: ignore[union-attr]
        assert client.send("pause", {}).state == "applied"
    keep_processes()


def keep_processes() -> None:
    """What runs now outlives this test: a run that tests share, and the reducers it has made meanwhile."""
    SHARED_PIDS.update(our_processes(set()))


@pytest.fixture(scope="session")
def small_assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 27 k parameters and text with some structure, so that a step takes some 10 ms."""
    folder = tmp_path_factory.mktemp("small")
    shape = demo_assets.llama_config(hidden=32, layers=2, heads=2, intermediate=64)
    demo_assets.make_model(folder / "model", shape, seed=7)
    words = ["def", "return", "import", "self", "value", "(", ")", ":", "\n    ", "for", "in", "range", "x"]
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(" ".join(random.Random(5).choices(words, k=4000)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def run_config(small_assets: Path) -> Callable[..., dict[str, Any]]:
    """A run file as parsed, `table__key` changes laid over it, or whole tables replaced."""

    def make(**changes: Any) -> dict[str, Any]:
        raw: dict[str, Any] = {
            "run": {"name": "small", "steps": 30, "seed": 3, "orphan_seconds": 300},
            "model": {"path": str(small_assets / "model")},
            "data": {
                "path": str(small_assets / "text"), "tokenizer": "bytes", "sequence_length": 24, "held_out": 0.05,
            },
            "batch": {"global": 12, "micro": 4},
            "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 3},
            "checkpoint": {"at_end": False},
            "calibration": {"at_start": "never", "seconds": 12},
            "nodes": {NODE: {"backend": "torch", "device": "cpu", "threads": 1}},
        }  # fmt: skip
        changes["policy"] = {"rebalance": {"mode": "off"}, **changes.get("policy", {})}  # shares stay as tests set them
        for name, value in changes.items():
            table, _, key = name.partition("__")
            if key:
                raw.setdefault(table, {})[key] = value
            else:
                raw[table] = value
        return raw

    return make


def wait_for_step(client: BlockingClient, step: int, seconds: float = STEP_SECONDS_LIMIT) -> m.Snapshot:
    """A snapshot in which the run has committed `step`, or has ended."""
    return _wait_for_run(client, lambda run: run.step >= step, seconds, f"step {step}")


def wait_for_checkpoint(client: BlockingClient, run: str) -> int:
    """The step of the run's first checkpoint, once that is complete."""

    def written() -> list[int]:
        events = client.events(run, limit=500).events
        return [event.data.step for event in events if isinstance(event.data, CheckpointWritten)]

    found: list[int] = until(written, what="a checkpoint", progress=lambda: client.snapshot(0).run)
    return found[0]


def wait_for_end(client: BlockingClient, seconds: float = 120.0) -> m.RunView:
    """The run's last view."""
    run = _wait_for_run(client, lambda run: False, seconds, "the run's end").run
    assert run is not None
    return run


def _wait_for_run(client: BlockingClient, holds: Callable[[m.RunView], bool], seconds: float, what: str) -> m.Snapshot:
    """A snapshot in which something holds of the run, or it has ended; each step of the run starts the time again."""
    seen: list[Any] = [None]

    def look() -> m.Snapshot | None:
        snapshot = client.snapshot(0)
        run = snapshot.run
        seen[0] = run and (run.state, run.step, run.generation)
        return snapshot if run and (holds(run) or run.state not in m.ACTIVE_RUN_STATES) else None

    found: m.Snapshot = until(look, seconds, what, lambda: seen[0])
    return found


def all_steps(client: BlockingClient, run: str | None = None) -> list[m.StepCommitted]:
    steps: list[m.StepCommitted] = []
    while True:
        page = client.steps(run, steps[-1].step if steps else 0)
        steps += page.steps
        if not page.more:
            return steps


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
