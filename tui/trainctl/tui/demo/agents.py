"""A demo's agents as children: each started again where it was when it ends unasked or hangs, all ended with it. A
simulated demo has simulated ones."""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Final

import tomli_w
import zmq

from trainctl.protocol.config import env_policy, run_file
from trainctl.protocol.files.durable_files import write_file
from trainctl.protocol.messages import TOPICS, Heartbeat
from trainctl.protocol.wire import sockets
from trainctl.tui.demo.folder import Session

HUNG_SECONDS = 5.0
"""An agent's heartbeats come each second."""
FIRST_SECONDS = 30.0
"""For the first of them: it may have a record to read."""
LOOK_SECONDS = 0.25
GAP_SECONDS = 2.0
"""A watcher that looks so late was stopped or asleep itself, and knows nothing of the time between."""


class HeartbeatWatch:
    """Pure: given heartbeats and asked at times of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._since, self._looked, self._limit_seconds = now, now, FIRST_SECONDS

    def beat(self, now: float) -> None:
        """A heartbeat has come."""
        self._since, self._limit_seconds = now, HUNG_SECONDS

    def is_lost(self, now: float) -> bool:
        """Return whether none has come for too long."""
        if now - self._looked > GAP_SECONDS:
            self._since = now
        self._looked = now
        return now - self._since >= self._limit_seconds


async def until_lost(live_address: str, clock: Callable[[], float] = time.monotonic) -> None:
    """Return when the agent that publishes at `live_address` has been silent for too long."""
    context = zmq.Context()
    try:
        socket = sockets.new_socket(context, zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, TOPICS[Heartbeat])
        sockets.connect(socket, live_address)
        pulse = HeartbeatWatch(clock())
        while not pulse.is_lost(clock()):
            if _has_beaten(socket):
                pulse.beat(clock())
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        context.destroy(linger=0)


def _has_beaten(socket: "zmq.Socket[bytes]") -> bool:
    """Return whether a heartbeat has come since the last look; reads them all."""
    found = False
    with contextlib.suppress(zmq.Again):
        while True:
            socket.recv_multipart(zmq.NOBLOCK)
            found = True
    return found


START_SECONDS = 30.0
LEAVE_SECONDS = 10.0
STEADY_SECONDS = 5.0
"""An agent that lived this long ended for a reason of its own; one that didn't gets a pause before the next."""
RESTART_SECONDS = 1.0
MAX_QUICK_ENDS = 5
Log = Callable[[str], None]


class StartError(Exception):
    """The demo can't begin; the text is one line for the person."""


class AgentProcess:
    """One node's agent, started again on the same addresses whenever it ends unasked or hangs."""

    def __init__(self, session: Session, node: str, log: Log) -> None:
        self._session, self._node, self._log = session, node, log
        self._environment = env_policy.without_agent_options(os.environ)
        self._said = session.agent_log(node)
        self._process: asyncio.subprocess.Process | None = None
        self._live_address = ""  # where it publishes
        self.leaving = False

    async def start(self) -> str:
        """Start it and give the address it listens at. Raises StartError with what it said instead."""
        command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--leash", "--name", self._node]
        where = ["--state", str(self._session.state), "--cluster", str(self._session.cluster_file)]
        with self._said.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *where,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
                pass_fds=self._session.lock_descriptors(),
                env=self._environment,
            )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise StartError(f"{self._node}'s agent didn't respond for {START_SECONDS:g} s; see {self._said}") from None
        if not line:
            await self._process.wait()
            text = self._said.read_text("utf-8", "replace") if self._said.is_file() else ""
            raise StartError(last_line(text) or f"{self._node}'s agent exited immediately")
        bound = json.loads(line)
        self._live_address = bound["live"]
        address: str = bound["listen"]
        return address

    async def keep(self) -> None:
        """Start it again within two seconds each time it ends; returns when that is of no use."""
        quick_ends = 0
        while True:
            began = time.monotonic()
            status = await self._until_ended()
            if self.leaving:
                return
            quick_ends = quick_ends + 1 if time.monotonic() - began < STEADY_SECONDS else 0
            self._log(f"{self._node}'s agent exited with {status}; restarting it")
            if quick_ends:
                await asyncio.sleep(RESTART_SECONDS)
            try:
                await self.start()
            except StartError as error:
                self._log(f"{self._node}'s agent doesn't start: {error}")
                quick_ends += 1
            if quick_ends > MAX_QUICK_ENDS:
                return

    async def _until_ended(self) -> int:
        """Return the exit status, also of an agent that hangs and is killed for that."""
        process, lost = self._process, asyncio.create_task(until_lost(self._live_address))
        assert process is not None
        ended = asyncio.create_task(process.wait())
        try:
            await asyncio.wait({ended, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done() and not ended.done():
                self._log(f"{self._node}'s agent hasn't responded for {HUNG_SECONDS:g} s; killing it")
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            return await ended
        finally:
            for task in (ended, lost):
                task.cancel()
            await asyncio.gather(ended, lost, return_exceptions=True)

    async def end(self) -> None:
        """SIGTERM, and SIGKILL to one that doesn't obey it."""
        self.leaving = True
        if self._process is None or self._process.returncode is not None:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._process.wait()
                    return


class Agents:
    """All of a demo's, by node; the first is the one that the run is started at."""

    def __init__(self, session: Session, nodes: Iterable[str], log: Log) -> None:
        """`nodes`: of the session's cluster file."""
        self.nodes = tuple(nodes)
        self._all = [AgentProcess(session, node, log) for node in self.nodes]

    @property
    def leaving(self) -> bool:
        return any(agent.leaving for agent in self._all)

    async def start(self) -> str:
        """Start them together and give the first one's address. Raises StartError with what one said instead."""
        started = await asyncio.gather(*(agent.start() for agent in self._all), return_exceptions=True)
        problem = next((item for item in started if isinstance(item, BaseException)), None)
        if problem is not None:
            raise problem
        return str(started[0])

    async def keep(self) -> None:
        """Start each again when it ends; returns when that is of no use for one of them."""
        await _first([agent.keep() for agent in self._all])

    async def end(self) -> None:
        """End all agents at once."""
        await asyncio.gather(*(agent.end() for agent in self._all))


async def _first(works: Sequence[Coroutine[None, None, None]]) -> None:
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def last_line(text: str) -> str:
    """Return the last line with something on it."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


NODES: Final = 8
SLOW_STEPS, DEATH_STEP = (60, 140), 40
"""The second node runs at half its speed from the first step to the other; the last one's trainer dies in its step."""
SAMPLES_PER_NODE: Final = 32
WARMUP_STEPS: Final = 20
EVALUATE_EVERY: Final = 50
_MACHINES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("rtx4090", {"device": "rtx4090"}),
    ("rtx3090", {"device": "rtx3090"}),
    ("l4", {"device": "l4"}),
    ("mac", {"samples_per_second": 24.0, "pass_seconds": 0.01, "memory_gb": 24.0, "backend": "mlx"}),
)
_ALL: Final = {"link_gbit": 25.0, "load_seconds": 2.0, "noise": 0.03, "drift": 0.1}
_MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""Some 110 M parameters."""


def nodes(count: int, *, faults: bool = True) -> dict[str, dict[str, Any]]:
    """Return the tables [nodes.NAME.simulated] of so many machines, the lead's first."""
    tables = {}
    for number in range(count):
        name, machine = _MACHINES[number % len(_MACHINES)]
        tables[f"{name}-{number // len(_MACHINES) + 1}"] = _ALL | machine
    if faults and count > 1:
        slow, last = list(tables)[1], list(tables)[-1]
        changes = [{"step": step, "speed": speed} for step, speed in zip(SLOW_STEPS, (0.5, 1.0), strict=True)]
        tables[slow] = tables[slow] | {"speeds": changes}
        tables[last] = tables[last] | {"fails_at": [DEATH_STEP]}
    return tables


def write_files(session: Session, count: int, *, faults: bool = True) -> None:
    """Write the cluster file, and what stands for the model and the text."""
    tables = {name: {"simulated": table} for name, table in nodes(count, faults=faults).items()}
    write_file(session.cluster_file, tomli_w.dumps({"nodes": tables}).encode())
    model = session.folder / "model"
    model.mkdir()
    write_file(model / "config.json", json.dumps(_MODEL).encode())
    write_file(session.folder / "data.txt", 4096 * b"A simulated run reads no data.\n")


def run_config(session: Session, names: Sequence[str], steps: int) -> dict[str, Any]:
    """Return the run file as plain values, checked."""
    raw: dict[str, Any] = {
        "run": {"name": "demo", "steps": steps},
        "model": {"path": str(session.folder / "model"), "init": "random", "dtype": "bfloat16"},
        "data": {
            "path": str(session.folder / "data.txt"),
            "tokenizer": "bytes",
            "sequence_length": 1024,
            "held_out": 0.001,
        },
        "batch": {"global": SAMPLES_PER_NODE * len(names), "micro": 8},
        "optimizer": {
            "learning_rate": 6e-4,
            "schedule": "cosine",
            "warmup_steps": min(WARMUP_STEPS, steps - 1),
            "clip_norm": 1.0,
        },
        "evaluate": {"every_steps": EVALUATE_EVERY},
        "checkpoint": {"at_end": False},
        "nodes": {name: {"threads": 1} for name in names},
    }
    return run_file.to_dict(run_file.parse(raw, "demo"))
