"""Real agents for the simulated nodes of a cluster file, all in this process. Only their trainers are simulated."""

import asyncio
import contextlib
import signal
from pathlib import Path

import msgspec

from trainctl.node_agent.agent import Agent, Options
from trainctl.node_agent.exporter.listen_address import ListenAddress
from trainctl.node_agent.simulate.simulated_trainers import SimulatedMachine, SimulatedTrainers
from trainctl.node_agent.transport import bind, parent_watch
from trainctl.protocol.config import cluster_file
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import agent_address, node_directory

MAX_NODES = 16
"""Every agent is connected with every other one, all in one process."""


class SimulatedAgents:
    """`async with` binds the agents; `serve` runs until a signal, or until standard input ends."""

    def __init__(
        self, cluster: Path, state: Path | None, *, seed: int = 0, parameters: int | None = None,
        metrics: ListenAddress | None = None, watches_parent: bool = False,
    ) -> None:  # fmt: skip
        """`state`: folder of the nodes and their runs. `metrics`: where the first node serves Prometheus.
        `watches_parent`: end with standard input. Raises InvalidInputError."""
        found = cluster_file.read(cluster, simulated=True)
        nodes = {
            name: msgspec.structs.replace(entry, address=agent_address(node_directory(name, state)))
            for name, entry in found.nodes.items()
            if entry.simulated is not None
        }
        if not nodes:
            raise InvalidInputError(f"{cluster}: nodes", "none is simulated; give one a table [nodes.NAME.simulated]")
        if len(nodes) > MAX_NODES:
            raise InvalidInputError(f"{cluster}: nodes", f"{len(nodes)} are simulated, the maximum is {MAX_NODES}")
        if watches_parent:
            parent_watch.check()
        self._watches_parent = watches_parent
        self._trainers = SimulatedTrainers(cluster, seed=seed, parameters=parameters)
        self.agents = [
            Agent(
                name, state_root=state, cluster=msgspec.structs.replace(found, nodes=nodes),
                options=Options(
                    metrics=metrics if name == next(iter(nodes)) else None, trainers=self._trainers,
                    reader=SimulatedMachine(name, node_directory(name, state), self._trainers),
                ),
            )
            for name in nodes
        ]  # fmt: skip

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
            await asyncio.gather(*(agent.serve() for agent in self.agents))
        finally:
            watching.cancel()
            self._stop()

    def _stop(self) -> None:
        for agent in self.agents:
            agent.stop()

    async def _watch_parent(self) -> None:
        if self._watches_parent:
            await parent_watch.let_go()
            self._stop()
