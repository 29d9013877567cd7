"""Trainers that are asyncio tasks: they speak to an agent as real ones do, and make their steps without a model.

What one does is that of a `SimRank`; here it gets its orders over the agent's own socket, and a life in the place of a
process: it can end with a status, hang, stop, or be slow.
"""

import asyncio
import hashlib
import itertools
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio
from tests.node_agent.support.simulated_ranks import SimRank, SimWorld

from trainctl.node_agent.trainers.supervisor import HostedTrainer, TrainerSupervisor
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.record import log_format
from trainctl.protocol.record.checkpoints import (
    MANIFEST_NAME,
    STATE_NAME,
    CheckpointMetadata,
    Environment,
    FileEntry,
    Lineage,
    Manifest,
    Performance,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.wire import codec, sockets

ALIVE_SECONDS = 0.2
STRIDE_SECONDS = 0.002
"""Pause after each piece of work, so that a run without end leaves the loop to others."""
_PIDS = itertools.count(10_000_000)  # above what the kernel gives to processes


def loss(step: int) -> float:
    """Return the loss that every simulated rank reports of a step."""
    return 1.0 + 4.0 / (step + 1)


class FakeTrainer:
    """One rank's trainer, from its start to its exit status."""

    def __init__(self, paths: RunPaths, rank: int, node: str, endpoint: str, world: SimWorld) -> None:
        self.paths, self.rank, self.node, self.endpoint = paths, rank, node, endpoint
        self.pid, self.started_at = next(_PIDS), time.time()
        self.exit_status: int | None = None
        self.stride_seconds = STRIDE_SECONDS
        config = run_file.read(paths.run_file)
        self.sim = SimRank(
            rank, world, run=paths.directory.name, pid=self.pid, backend=config.nodes[node].backend or "torch",
            save=self._save, measures=lambda work, step: {"loss_sum": loss(step)},
            background=config.checkpoint.background, held_out=10 if config.data.held_out else 0,
        )  # fmt: skip
        self._orders: asyncio.Queue[m.ToTrainer] = asyncio.Queue()
        self._answers: asyncio.Queue[m.FromTrainer] = asyncio.Queue()
        self._ended = asyncio.Event()
        self._metrics = MetricsWriter(paths.rank_record(rank), node)
        self.changed = asyncio.Event()  # something it may have waited for has happened
        self.peers: Sequence[FakeTrainer] = (self,)  # trainers of its run: they wait for each other's parts

    def begin_at(self, checkpoint: Path | None) -> int:
        """Take a checkpoint's state, and return its step; 0 without one."""
        if checkpoint is not None:
            self.sim.last_step = int(checkpoint.name.removeprefix("step-"))
            self.sim.cursor = json.loads((checkpoint / STATE_NAME).read_bytes())["cursor"]
            self.sim.state = self.sim.world.states.setdefault(self.sim.last_step, f"as in {checkpoint.name}")
        return self.sim.last_step

    @property
    def is_alive(self) -> bool:
        return self.exit_status is None

    # ------------------------------------------------------------ faults

    def die(self, status: int = -signal.SIGKILL) -> None:
        """End at once, as by a signal (negative) or with an exit status."""
        if self.is_alive:
            self.sim.gone = True
            self.sim._drop_group()
            self._wake_peers()
            self._end(status)

    def _end(self, status: int) -> None:
        """Its reports are on the disk before anyone can see how it ended."""
        self._metrics.close()
        self.exit_status = status
        self._ended.set()

    def freeze(self) -> None:
        """Say and do nothing more, as by SIGSTOP, until `thaw`."""
        self.sim.silent = True

    def thaw(self) -> None:
        self.sim.silent = False
        self.changed.set()

    def hang(self) -> None:
        """Say that it is alive, and make no step."""
        self.sim.hung = True

    # ------------------------------------------------------------ life

    async def run(self, context: zmq.asyncio.Context) -> None:
        """Until it has ended; what goes wrong in here is an error of the test or of the agent, and is raised."""
        socket = sockets.new_socket(context, zmq.DEALER)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 0)
        socket.connect(self.endpoint)
        self._log("INFO", f"rank {self.rank} on {self.node}: a simulated trainer")
        self.sim.load()
        self._flush()
        parts = (self._receive(socket), self._send(socket), self._obey(), self._work(), self._beat())
        tasks = [asyncio.create_task(part) for part in parts]
        ending = asyncio.create_task(self._ended.wait())
        try:
            done, _ = await asyncio.wait([*tasks, ending], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (*tasks, ending):
                task.cancel()
            await asyncio.gather(*tasks, ending, return_exceptions=True)
            socket.close(linger=1000 if self.exit_status == 0 else 0)
            if self.is_alive:
                self._end(1)

    def _flush(self) -> None:
        while self.sim.up:
            answer = self.sim.up.popleft()
            if isinstance(answer, m.Report) and answer.kind == "train":
                self._metrics.append(answer)
            self._answers.put_nowait(answer)

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            await socket.send(codec.encode(await self._answers.get()))

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            (frame,) = await socket.recv_multipart()
            order = codec.decode_order(frame)
            if order.run == self.sim.run:
                self._orders.put_nowait(order)

    async def _obey(self) -> None:
        while True:
            order = await self._orders.get()
            while self.sim.silent:
                await self._change()
            if isinstance(order, m.StepPlan) and order.recorded:
                continue
            if isinstance(order, m.Form) and order.step == self.sim.last_step:
                self.sim.cursor = max(self.sim.cursor, order.cursor)  # a rollback has skipped positions
            self.sim.down.append(order)
            self.sim.take_order()
            self._flush()
            self._wake_peers()
            if isinstance(order, m.Leave):
                if order.checkpoint:
                    self._write(self.sim.last_step, self.sim.cursor, self.sim.highest)
                self._log("INFO", f"leaving: {order.reason}")
                while not self._answers.empty():
                    await asyncio.sleep(self.stride_seconds)
                self._end(0)
                return

    async def _change(self) -> None:
        self.changed.clear()
        await self.changed.wait()

    async def _work(self) -> None:
        while True:
            if self.sim.can_write:
                self.sim.write()
            elif self.sim.can_work:
                self.sim.work()
            else:
                await self._change()
                continue
            self._flush()
            self._wake_peers()
            await asyncio.sleep(self.stride_seconds)

    def _wake_peers(self) -> None:
        """Have them look again: they may have waited for this rank's part, or for the end of a group."""
        for other in self.peers:
            other.changed.set()

    async def _beat(self) -> None:
        while True:
            if not self.sim.silent and self._answers.empty():
                self._answers.put_nowait(self.sim.alive())
                if (said := self.sim.of_write()) is not None:
                    self._answers.put_nowait(said)
            await asyncio.sleep(ALIVE_SECONDS)

    # ------------------------------------------------------------ files

    def _log(self, level: str, text: str) -> None:
        with self.paths.log(self.rank).open("a", encoding="utf-8") as log:
            log.write(log_format.write(time.time(), level, text) + "\n")

    def _save(self, plan: m.StepPlan) -> tuple[str, int]:
        return self._write(plan.step, plan.cursor, plan.generation)

    def _write(self, step: int, cursor: int, generation: m.Generation | None) -> tuple[str, int]:
        """Write a whole checkpoint, of which only the step and the cursor mean anything."""
        folder = self.paths.checkpoint(step)
        folder.mkdir(parents=True, exist_ok=True)
        state = json.dumps({"cursor": cursor, "step": step}).encode()
        (folder / STATE_NAME).write_bytes(state)
        config = run_file.read(self.paths.run_file)
        manifest = Manifest(
            run=self.sim.run, step=step, written_at=time.time(),
            files={STATE_NAME: FileEntry(len(state), hashlib.sha256(state).hexdigest())},
            metadata=CheckpointMetadata(
                recipe=run_file.to_dict(config), performance=Performance(),
                lineage=Lineage(run=self.sim.run, generation=generation),
                environment=Environment(
                    node=self.node, program="0", python="3", library="none 0", device="cpu", system=os.name
                ),
            ),
        )  # fmt: skip
        (folder / MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
        return str(folder), manifest.size_bytes


class FakeSupervisor(TrainerSupervisor):
    """The trainers of all nodes of a test, which outlive the agents that started them."""

    def __init__(self) -> None:
        super().__init__()
        self._context = zmq.asyncio.Context()
        self._newest: dict[tuple[str, int], FakeTrainer] = {}
        self._worlds: dict[str, SimWorld] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.starts_with: dict[str, dict[str, object]] = {}
        """By node: attributes of the SimRank of each trainer that is started there."""
        self.refuses: set[str] = set()
        """Nodes on which no process can be started."""

    def start(
        self, run_paths: RunPaths, rank: int, argv: Sequence[str], env: Mapping[str, str] | None = None,
        nice: int | None = None,
    ) -> None:  # fmt: skip
        options = dict(zip(argv[3::2], argv[4::2], strict=False))
        run, node = run_paths.directory.name, options["--node"]
        if self.find(run_paths, rank) is not None:
            raise RefusedError(f"rank {rank} of {run} is already running")
        if node in self.refuses:
            raise RefusedError(f"rank {rank} of {run} cannot be started: no memory")
        world = self._worlds.setdefault(run, SimWorld(0, silent_failures=0.0))
        trainer = FakeTrainer(run_paths, rank, node, options["--endpoint"], world)
        checkpoint = options.get("--resume-from")
        step = trainer.begin_at(Path(checkpoint) if checkpoint is not None else None)
        if not self.of_run(run):
            world.go_back(step)  # all begin there
        for name, value in self.starts_with.get(node, {}).items():
            setattr(trainer.sim, name, value)
        self._newest[_key(run_paths, rank)] = trainer
        for other in (living := self.of_run(run)):
            other.peers = living
        self._tasks.append(asyncio.get_running_loop().create_task(trainer.run(self._context)))

    def of_run(self, run: str) -> list[FakeTrainer]:
        """The trainers of a run that live."""
        return [one for one in self._newest.values() if one.is_alive and one.sim.run == run]

    def on(self, node: str) -> list[FakeTrainer]:
        """The trainers on a node that live."""
        return [one for one in self._newest.values() if one.is_alive and one.node == node]

    def find(self, run_paths: RunPaths, rank: int) -> HostedTrainer | None:
        trainer = self._newest.get(_key(run_paths, rank))
        if trainer is None or not trainer.is_alive:
            return None
        return HostedTrainer(trainer.pid, trainer.started_at, ("trainer",), trainer.pid)

    def exit_status(self, run_paths: RunPaths, rank: int) -> int | None:
        trainer = self._newest.get(_key(run_paths, rank))
        return trainer.exit_status if trainer is not None else None

    def is_ending(self, run_paths: RunPaths, rank: int) -> bool:
        return False

    def kill(self, run_paths: RunPaths, rank: int, grace_seconds: float = 0.0) -> bool:
        return self._end(run_paths, rank, -signal.SIGTERM)

    def kill_hung(self, run_paths: RunPaths, rank: int) -> bool:
        return self._end(run_paths, rank, -signal.SIGKILL)

    def dump_stacks(self, run_paths: RunPaths, rank: int) -> bool:
        return self.find(run_paths, rank) is not None

    def _end(self, run_paths: RunPaths, rank: int, status: int) -> bool:
        trainer = self._newest.get(_key(run_paths, rank))
        if trainer is None or not trainer.is_alive:
            return False
        trainer.die(status)
        return True

    async def close(self) -> None:
        """End all trainers; an error in one is raised."""
        for trainer in self._newest.values():
            trainer.die()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        for error in ended:
            if isinstance(error, Exception):
                raise error


def _key(run_paths: RunPaths, rank: int) -> tuple[str, int]:
    return str(run_paths.directory), rank
