"""The two sides of the group benchmarks: a run under agents, and torch DistributedDataParallel on the same work."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import tomli_w

from trainctl.protocol.config.names import agent_address, node_directory
from trainctl.protocol.messages import ACTIVE_RUN_STATES, HistoryRequest, SnapshotRequest, StepsRequest

SEQUENCE = 128
DEADLINE_SECONDS = 300.0
WARM_STEPS = 2
"""Steps at the start of each measurement that are not counted."""

POLL_SECONDS = 0.5
"""Seldom, for asking takes time from what is measured."""


def until(condition: Callable[[], Any], what: str) -> Any:
    """Return what `condition` gives once it is true. Raises TimeoutError at the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {DEADLINE_SECONDS:g} s")
        time.sleep(POLL_SECONDS)
    return found


def end_on_sigterm() -> None:
    """Let SIGTERM leave all blocks as Ctrl-C does, so that what they started ends too."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def kill_left(folder: Path) -> int:
    """Kill all processes that have a file in `folder` open, or name it in their command line; how many there were."""
    found = [
        process
        for process in psutil.process_iter(["cmdline", "open_files", "status"])
        if process.info["status"] != psutil.STATUS_ZOMBIE
        and process.pid != os.getpid()
        and any(str(folder) in text for text in _traces(process.info))
    ]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, 20)
    return len(found)


def _traces(info: dict[str, Any]) -> list[str]:
    return [*(info["cmdline"] or ()), *(file.path for file in info["open_files"] or ())]


def run_config(folder: Path, nodes: Sequence[str], batch: int, micro: int, **group: Any) -> dict[str, Any]:
    """A run file over `nodes`, one CPU thread each, that never ends by itself unless its agents are gone."""
    return {
        "run": {"name": "bench", "steps": 1_000_000, "orphan_seconds": 60},
        "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "data"), "tokenizer": "bytes", "sequence_length": SEQUENCE, "held_out": 0.0},
        "batch": {"global": batch, "micro": micro},
        "optimizer": {"learning_rate": 1e-4, "schedule": "constant"},
        "checkpoint": {"at_end": False},
        "group": group,
        "nodes": {node: {"backend": "torch", "device": "cpu", "threads": 1} for node in nodes},
    }


@contextlib.contextmanager
def agent(node: str, state: Path) -> Iterator["tuple[subprocess.Popen[str], str]"]:
    """Yield an agent's process and its address; end it with the block."""
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", node, "--state", str(state)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())["listen"]
    finally:
        process.terminate()
        end(process)


class Cluster:
    """Agents on Unix sockets; the first is the lead. Leave it as a context manager."""

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self._folder, self._nodes = folder, nodes
        self._agents: list[subprocess.Popen[str]] = []

    def __enter__(self) -> "Cluster":
        state = self._folder / "state"
        addresses = {node: agent_address(node_directory(node, state)) for node in self._nodes}
        file = self._folder / "cluster.toml"
        file.write_text(tomli_w.dumps({"nodes": {node: {"address": at} for node, at in addresses.items()}}))
        with contextlib.ExitStack() as unless_begun:
            unless_begun.callback(self.__exit__)
            for node in self._nodes:
                self._agents.append(self._start_agent(node))
            unless_begun.pop_all()
        from trainctl.protocol.client.blocking import BlockingClient  # ZeroMQ: not for the workers of the other side

        self.client = BlockingClient(addresses[self._nodes[0]], by="bench").__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self.client.send("stop", {"checkpoint": False}, timeout_seconds=60)
            until(lambda: self.client.ask(SnapshotRequest, 0).run.state not in ACTIVE_RUN_STATES, "the run's end")  # type: ignore[union-attr]
        with contextlib.suppress(AttributeError):
            self.client.__exit__(None, None, None)
        for agent in self._agents:
            agent.terminate()
            end(agent)

    def _start_agent(self, node: str) -> "subprocess.Popen[str]":
        """Start one, and hear its first word."""
        command = [
            sys.executable,
            "-m",
            "trainctl.node_agent.cli",
            "run",
            "--cluster",
            str(self._folder / "cluster.toml"),
        ]
        own = ["--name", node, "--state", str(self._folder / "state")]
        agent = subprocess.Popen([*command, *own], stdout=subprocess.PIPE, text=True)
        assert agent.stdout is not None
        agent.stdout.readline()
        return agent

    def restart(self, index: int) -> None:
        """Kill an agent, and start it again."""
        self._agents[index].kill()
        self._agents[index].wait()
        self._agents[index] = self._start_agent(self._nodes[index])

    def start(self, config: dict[str, Any]) -> None:
        """Start a run and pause it after its first step."""
        self.client.send("start-run", {"config": config}, timeout_seconds=DEADLINE_SECONDS)
        self.client.send("pause", {}, timeout_seconds=DEADLINE_SECONDS)

    def measure(self, steps: int) -> dict[str, float]:
        """Resume for a while: tokens/s from commit to commit, and the mean seconds a rank waited for its plan."""
        view = self.client.ask(SnapshotRequest, 0).run
        assert view is not None
        self.client.send("resume", {}, timeout_seconds=DEADLINE_SECONDS)
        first = self._step() + WARM_STEPS
        until(lambda: self._step() >= first + steps, f"step {first + steps}")
        self.client.send("pause", {}, timeout_seconds=DEADLINE_SECONDS)
        rows = self.client.ask(StepsRequest, after_step=first - 1, limit=steps + 1).steps
        seconds = rows[-1].committed_at - rows[0].committed_at
        waits = self.client.ask(HistoryRequest, view.run, ("wait_seconds",), rows[1].step, rows[-1].step, 2000).series
        mean = [sum(series.mean) / len(series.mean) for series in waits if series.mean]
        return {
            "tokens_per_second": sum(row.tokens for row in rows[1:]) / seconds,
            "step_seconds": seconds / (len(rows) - 1),
            "plan_wait_seconds": max(mean, default=0.0),
        }

    def trainer_pids(self) -> dict[str, int]:
        """By node."""
        view = self.client.ask(SnapshotRequest, 0).run
        assert view is not None
        return {rank.node: rank.pid for rank in view.ranks if rank.pid is not None}

    def _step(self) -> int:
        view = self.client.ask(SnapshotRequest, 0).run
        assert view is not None
        if view.state not in ACTIVE_RUN_STATES:
            raise RuntimeError(f"the run {view.state}: {view.reason}")
        return view.step


class Ddp:
    """Worker processes of `benchmarks/lib/ddp_worker.py`, one thread each, that wait between measurements."""

    def __init__(self, folder: Path, world: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        command = [
            sys.executable,
            str(Path(__file__).with_name("ddp_worker.py")),
            "--world",
            str(world),
            "--port",
            port,
        ]
        self._workers = [
            subprocess.Popen(
                [*command, "--rank", str(rank), "--folder", str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        for worker in self._workers:
            self._hear(worker)

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def measure(self, steps: int, samples: int, micro: int) -> dict[str, float]:
        """`samples` a rank and step."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(json.dumps({"steps": steps, "samples": samples, "micro": micro}) + "\n")
            worker.stdin.flush()
        said = [self._hear(worker) for worker in self._workers]
        seconds = max(row["seconds"] for row in said)
        return {"tokens_per_second": sum(row["tokens"] for row in said) / seconds, "step_seconds": seconds / steps}

    def close(self) -> None:
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            end(worker)

    @staticmethod
    def _hear(worker: "subprocess.Popen[str]") -> dict[str, float]:
        assert worker.stdout is not None
        line = worker.stdout.readline()
        if not line:
            raise RuntimeError(f"a DDP worker ended with {worker.wait()}")
        found: dict[str, float] = json.loads(line)
        return found


@contextlib.contextmanager
def ddp(folder: Path, world: int) -> Iterator[Ddp]:
    """DDP workers, ended with the block."""
    side = Ddp(folder, world)
    try:
        yield side
    finally:
        side.close()


def end(process: "subprocess.Popen[str]", seconds: float = 20.0) -> None:
    """Wait for one that was asked to end, and kill it if it doesn't."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
