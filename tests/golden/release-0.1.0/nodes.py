"""The three agents of the frozen cluster and what is done to their processes. Runs in the venv with the 0.1.0 wheel."""

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from trainctl.protocol.blocking import BlockingClient
from trainctl.protocol.keyring import Keyring
from trainctl.protocol.keys import KeyFolder
from trainctl.protocol.statuspage import read_status

from trainctl.protocol import cluster
from trainctl.protocol import messages as m

ROOT = Path("/tmp/trainctl-0.1.0")
STATE, KEYS, LOGS, CLUSTER = ROOT / "state", ROOT / "keys", ROOT / "logs", ROOT / "cluster.toml"
BIN = ROOT / "venv" / "bin"
PORTS = {"alpha": 27410, "beta": 27420, "gamma": 27430}
FATAL = 180.0
ENV = {
    "HOME": str(ROOT / "home"), "PATH": f"{BIN}:/usr/bin:/bin", "USER": "test-key", "LOGNAME": "test-key",
    "LANG": "C.UTF-8", "TZ": "UTC", "TRAINCTL_STATE": str(STATE), "TRAINCTL_CLUSTER": str(CLUSTER),
    "TRAINCTL_KEYS": str(KEYS / "alpha"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


def until(condition: Callable[[], Any], what: str, seconds: float = FATAL) -> Any:
    """What `condition` gives once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what} did not come in {seconds:g} s")


def trainctl(*words: str, expect: int | None = 0, keys: str = "alpha") -> str:
    """What the command line prints on standard output."""
    done = subprocess.run(
        [BIN / "trainctl", *words], env={**ENV, "TRAINCTL_KEYS": str(KEYS / keys)}, capture_output=True, text=True,
        check=False, cwd=ROOT, timeout=FATAL,
    )  # fmt: skip
    print("$ trainctl", *words, "->", done.returncode, done.stdout.strip()[:150], done.stderr.strip()[:200], flush=True)
    assert expect is None or done.returncode == expect, (words, done.returncode, done.stdout, done.stderr)
    return done.stdout


class Nodes:
    """The agents by node."""

    def __init__(self) -> None:
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, file: Path = CLUSTER, more: tuple[str, ...] = ()) -> None:
        command = [BIN / "trainctl-agent", "run", "--name", node, "--cluster", file, "--state", STATE, *more]
        with (LOGS / f"agent-{node}.log").open("ab") as log:
            self.agents[node] = subprocess.Popen(
                command, env={**ENV, "TRAINCTL_KEYS": str(KEYS / node)}, stdout=subprocess.PIPE, stderr=log, cwd=ROOT
            )
        out = self.agents[node].stdout
        assert out is not None
        line = out.readline()
        assert line, f"no agent {node}"
        with (LOGS / f"agent-{node}.log").open("ab") as log:
            log.write(line)

    def end(self, node: str, number: signal.Signals = signal.SIGKILL) -> None:
        process = self.agents.pop(node)
        process.send_signal(number)
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()

    def restart(self, node: str, *more: str) -> None:
        self.end(node)
        self.start(node, more=more)

    def pid(self, node: str) -> int:
        return self.agents[node].pid


@contextlib.contextmanager
def client(node: str = "alpha") -> Iterator[BlockingClient]:
    ring = Keyring(KeyFolder(KEYS / "alpha"), cluster.read(CLUSTER))
    with BlockingClient(f"tcp://127.0.0.1:{PORTS[node]}", by="operator", keys=ring, timeout_seconds=30) as made:
        yield made


def view(node: str = "alpha") -> m.RunView:
    with client(node) as asked:
        found = asked.snapshot(0).run
    assert found is not None
    return found


def in_touch() -> None:
    for node in PORTS:
        with client(node) as asked:
            until(lambda a=asked: all(p.state == "connected" for p in a.snapshot(0).peers), f"{node}'s peers")


class Run:
    """One run, asked about at its lead."""

    def __init__(self, id_: str, ranks: tuple[str, ...], lead: str = "alpha") -> None:
        self.id, self.ranks, self.lead = id_, ranks, lead

    def folder(self, node: str) -> Path:
        return STATE / node / "runs" / self.id

    def texts(self) -> list[str]:
        with client(self.lead) as asked:
            return [event.text for event in asked.events(self.id, limit=500, newest=True).events]

    def event(self, words: str, seconds: float = FATAL, times: int = 1) -> None:
        until(lambda: sum(words in text for text in self.texts()) >= times, f"event {words!r}", seconds)
        print("  event:", [text for text in self.texts() if words in text][-1], flush=True)

    def send(self, verb: str, *words: str, node: str = "", expect: int | None = 0, **options: str) -> dict[str, Any]:
        line = ["send", verb, *words, "--json", "--connect", f"tcp://127.0.0.1:{PORTS[self.lead]}"]
        line += ["--node", node] if node else []
        for name, value in options.items():
            line += [f"--{name.replace('_', '-')}", value]
        said: dict[str, Any] = json.loads(trainctl(*line, expect=expect) or "{}")
        return said

    def step(self) -> int:
        return view(self.lead).step

    def more(self, steps: int) -> None:
        wanted = self.step() + steps
        until(lambda: self.step() >= wanted, f"step {wanted}")

    def states(self) -> dict[str, str]:
        return {rank.node: rank.state for rank in view(self.lead).ranks}

    def whole(self, *nodes: str) -> None:
        """All ranks take part again; paused while they load, so that no steps go by."""
        with client(self.lead) as asked:
            asked.send("pause", {}, timeout_seconds=60)
            until(lambda: self._loaded(asked, nodes or self.ranks), "the trainers")
            asked.send("resume", {}, timeout_seconds=60)
        until(lambda: all(self.states()[node] == "run" for node in nodes or self.ranks), "the ranks' return")

    @staticmethod
    def _loaded(asked: BlockingClient, nodes: tuple[str, ...]) -> bool:
        run = asked.snapshot(0).run
        return run is not None and all(rank.backend for rank in run.ranks if rank.node in nodes)

    def trainer(self, node: str) -> int:
        pid: int = json.loads((self.folder(node) / f"rank-{self.ranks.index(node)}.process.json").read_text())["pid"]
        return pid

    def signal(self, node: str, number: signal.Signals) -> None:
        os.kill(self.trainer(node), number)

    def reducers(self, node: str) -> list[psutil.Process]:
        return psutil.Process(self.trainer(node)).children(recursive=True)

    def phase(self, node: str) -> str:
        status = read_status(self.folder(node) / f"rank-{self.ranks.index(node)}.status")
        return status.phase if status else ""

    def in_phase(self, node: str, *phases: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while self.phase(node) not in phases:
            assert time.monotonic() < deadline, f"{node} never in {phases}"


_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes, _libc.ptrace.restype = [ctypes.c_long] * 4, ctypes.c_long
_ATTACH, _DETACH, _WALL = 16, 17, 0x40000000


@contextlib.contextmanager
def held(pid: int) -> Iterator[None]:
    """A process's main thread stands still; its other threads go on."""
    assert _libc.ptrace(_ATTACH, pid, 0, 0) == 0, "ptrace is not permitted here"
    os.waitpid(pid, _WALL)
    try:
        yield
    finally:
        _libc.ptrace(_DETACH, pid, 0, 0)


@contextlib.contextmanager
def no_room(pid: int, limit_bytes: int = 4096) -> Iterator[None]:
    """No file of a process can grow beyond so many bytes, as on a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
