"""Real agents for the simulated nodes of a cluster file, all in this process. Only their trainers are simulated.

Simulated ranks in the places of trainers speak to the agents over their sockets, in real time.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from trainctl.node_agent.agent import Agent, Options
from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.readings.host import HostReader
from trainctl.node_agent.simulate import scenario
from trainctl.node_agent.simulate.models import DeviceSpec, RealTime
from trainctl.node_agent.simulate.simulated_rank import make_ranks
from trainctl.node_agent.simulate.simulated_reports import host_reading
from trainctl.node_agent.trainers.supervisor import SIMULATED_NOTICE, HostedTrainer, TrainerSupervisor
from trainctl.node_agent.transport import bind
from trainctl.protocol import messages
from trainctl.protocol.config import cluster_file
from trainctl.protocol.config.addresses import ListenAddress
from trainctl.protocol.config.names import agent_address, node_directory
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec, sockets

ALIVE_SECONDS = 1.0
FAREWELL_MILLISECONDS = 1000
"""Seconds that a trainer's last message may take to its agent."""


class RunTrainers:
    """The ranks of one run, and how each is connected to its node's agent."""

    def __init__(self, simulated: scenario.Scenario, run: str, context: zmq.asyncio.Context) -> None:
        self.scenario, self._context, self._time = simulated, context, RealTime()
        self.ranks = make_ranks(simulated, run, self._time.began_at, self._time, self._say)
        self.started_at = dict[int, float]()  # Unix seconds, of each rank's newest trainer
        self.exit_status = dict[int, int]()  # of those that have ended
        self._logs = dict[int, Path]()
        self._sockets = dict[int, zmq.asyncio.Socket]()
        self._tasks = dict[int, asyncio.Task[None]]()

    def start(self, rank: int, endpoint: str, log: Path) -> None:
        """Start a rank's trainer."""
        self.exit_status.pop(rank, None)
        self.started_at[rank], self._logs[rank] = time.time(), log
        log.parent.mkdir(parents=True, exist_ok=True)
        self._write_log(rank, "INFO", SIMULATED_NOTICE)
        socket = self._sockets[rank] = sockets.new_socket(self._context, zmq.DEALER)
        socket.connect(endpoint)
        self.ranks[rank].start()
        self._tasks[rank] = asyncio.create_task(self._serve(rank, socket), name=f"simulated rank {rank}")

    async def _serve(self, rank: int, socket: zmq.asyncio.Socket) -> None:
        beating = asyncio.create_task(self._beat(rank))
        try:
            while True:
                (frame,) = await socket.recv_multipart()
                order = codec.decode_order(frame)
                if not isinstance(order, messages.WorkSlice):
                    self.ranks[rank].take(order)
        finally:
            beating.cancel()

    async def _beat(self, rank: int) -> None:
        while True:
            self._say(self.ranks[rank].alive_message())
            await asyncio.sleep(ALIVE_SECONDS)

    def _say(self, event: conductor_events.Input) -> None:
        match event:
            case conductor_events.RankEnded(rank, clean, why):
                self.end(rank, 0 if clean else 1, why)
            case messages.Message() if event.rank in self._sockets:
                self._sockets[event.rank].send(codec.encode(event))

    def end(self, rank: int, status: int, why: str) -> None:
        """Keep how a trainer ended, and disconnect it."""
        if rank in self.exit_status:
            return
        self._write_log(rank, "INFO" if status == 0 else "ERROR", "leaving" if status == 0 else why)
        self.exit_status[rank] = status
        self._tasks.pop(rank).cancel()
        self._sockets.pop(rank).close(linger=FAREWELL_MILLISECONDS)

    def _write_log(self, rank: int, level: str, text: str) -> None:
        with self._logs[rank].open("a", encoding="utf-8") as log:
            log.write(log_format.write(time.time(), level, text) + "\n")


class SimulatedTrainers(TrainerSupervisor):
    """The trainers of all nodes of a cluster file, in this process."""

    is_simulated = True

    def __init__(self, cluster: Path, *, seed: int = 0, parameters: int | None = None) -> None:
        """`cluster`: the file whose nodes are simulated. `parameters`: trained ones, where the model isn't here."""
        super().__init__()
        self._cluster, self._seed, self._parameters = cluster, seed, parameters
        self._context = zmq.asyncio.Context()
        self._runs: dict[str, RunTrainers] = {}

    def start(
        self,
        run_paths: RunPaths,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        nice: int | None = None,
    ) -> None:
        run = run_paths.directory.name
        if self.find(run_paths, rank) is not None:
            raise RefusedError(f"rank {rank} of {run} is already running")
        try:
            if run not in self._runs:
                simulated = scenario.read(
                    self._cluster, run_paths.run_file, seed=self._seed, steps=None, parameters=self._parameters
                )
                self._runs[run] = RunTrainers(simulated, run, self._context)
            self._runs[run].start(rank, argv[argv.index("--endpoint") + 1], run_paths.log(rank))
        except (InvalidInputError, OSError) as error:
            raise RefusedError(f"rank {rank} of {run} cannot be started: {error}") from None

    def find(self, run_paths: RunPaths, rank: int) -> HostedTrainer | None:
        """Return the rank's trainer if it lives; its process is this one."""
        run = self._runs.get(run_paths.directory.name)
        if run is None or rank not in run.started_at or rank in run.exit_status:
            return None
        return HostedTrainer(os.getpid(), run.started_at[rank], ("simulated",), os.getpid())

    def exit_status(self, run_paths: RunPaths, rank: int) -> int | None:
        run = self._runs.get(run_paths.directory.name)
        return run.exit_status.get(rank) if run is not None else None

    def kill(self, run_paths: RunPaths, rank: int, grace_seconds: float = 0.0) -> bool:
        if self.find(run_paths, rank) is None:
            return False
        run = self._runs[run_paths.directory.name]
        run.ranks[rank].die("ended by its agent")
        run.end(rank, -signal.SIGTERM, "ended by its agent")
        return True

    def device(self, node: str) -> DeviceSpec | None:
        """Return a node's device, once it has taken part in a run."""
        for run in reversed(self._runs.values()):
            nodes = [*run.scenario.config.nodes]
            if node in nodes:
                return run.scenario.devices[nodes.index(node)]
        return None

    def close(self) -> None:
        """End all trainers."""
        for run in self._runs.values():
            for rank in run.started_at:
                run.end(rank, -signal.SIGTERM, "the simulation has ended")
        self._context.destroy(linger=0)


class SimulatedMachine(HostReader):
    """Reads a node's simulated device."""

    def __init__(self, node: str, path: Path, trainers: SimulatedTrainers) -> None:
        super().__init__(node, path, devices=())
        self._trainers = trainers

    def read(self, at: float, own_pids: Container[int] = (), trainer: int | None = None) -> messages.HostReading:
        return host_reading(self._node, at, self._trainers.device(self._node))


MAX_NODES = 16
"""Every agent is connected with every other one, all in one process."""


class SimulatedAgents:
    """`async with` binds the agents; `serve` runs until a signal, or until standard input ends."""

    def __init__(
        self,
        cluster: Path,
        state: Path | None,
        *,
        seed: int = 0,
        parameters: int | None = None,
        metrics: ListenAddress | None = None,
        watches_parent: bool = False,
    ) -> None:
        """`state`: folder of the nodes and their runs. `metrics`: where the first node serves Prometheus.
        `watches_parent`: end with standard input. Raises InvalidInputError."""
        described = cluster_file.read(cluster, simulated=True)
        nodes = {
            name: msgspec.structs.replace(entry, address=agent_address(node_directory(name, state)))
            for name, entry in described.nodes.items()
            if entry.simulated is not None
        }
        if not nodes:
            raise InvalidInputError(f"{cluster}: nodes", "none is simulated; give one a table [nodes.NAME.simulated]")
        if len(nodes) > MAX_NODES:
            raise InvalidInputError(f"{cluster}: nodes", f"{len(nodes)} are simulated, the maximum is {MAX_NODES}")
        if watches_parent:
            bind.check_parent()
        self._watches_parent = watches_parent
        self._trainers = SimulatedTrainers(cluster, seed=seed, parameters=parameters)
        self.agents = [
            Agent(
                name,
                state_root=state,
                cluster=msgspec.structs.replace(described, nodes=nodes),
                options=Options(
                    metrics=metrics if name == next(iter(nodes)) else None,
                    trainers=self._trainers,
                    reader=SimulatedMachine(name, node_directory(name, state), self._trainers),
                ),
            )
            for name in nodes
        ]

    async def __aenter__(self) -> "SimulatedAgents":
        bind.allow_open_files()
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(self._trainers.close)
            for agent in self.agents:
                await stack.enter_async_context(agent)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def serve(self) -> None:
        """Answer until asked to stop; an error in an agent ends all and is raised."""
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        watching = asyncio.create_task(self._watch_parent(), name="parent watch")
        try:
            await asyncio.gather(*map(self._serve, self.agents))
        finally:
            watching.cancel()

    async def _serve(self, agent: Agent) -> None:
        """Have all end with one: a signal before `serve` has stopped only the agent that was bound last."""
        try:
            await agent.serve()
        finally:
            self._stop()

    def _stop(self) -> None:
        for agent in self.agents:
            agent.stop()

    async def _watch_parent(self) -> None:
        if self._watches_parent:
            await bind.parent_gone()
            self._stop()
