"""Clusters of real agents in one event loop, with real sockets, files and databases, and simulated trainers.

    async with in_process_cluster(tmp_path, NODES) as cluster:
        async with cluster["alpha"].client() as client:
            await client.send("start-run", {"config": run_config(nodes=on("alpha", "beta"))})

`BlockingCluster` is the same for tests that use a BlockingClient or the command line: its loop runs in a thread.
"""

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

from tests.asking import run_of
from tests.cluster.fake_trainers import FakeSupervisor, FakeTrainer
from tests.cluster.run_files import NODE, NODES
from tests.cluster.waits import PatientAsyncClient, PatientClient
from tests.integration.support.ports import free_addresses
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent import agent as agent_module
from trainctl.node_agent.agent import Agent, Options
from trainctl.node_agent.conductor import conductor, restarts
from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.roles import followed_run, follower
from trainctl.node_agent.runs import launch
from trainctl.node_agent.services import supervision
from trainctl.node_agent.transport import conversations, peer_link, peer_pool
from trainctl.protocol import messages as m
from trainctl.protocol.client import client as client_module
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import Client
from trainctl.protocol.config import cluster_file
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security.keys import KeyFolder

T = TypeVar("T")
SILENT_SECONDS = 1.0
"""After so long agents take each other for gone: more than one loop stands still on a busy machine."""
RECLAIM_SECONDS = 1.5
PACE = (
    (agent_module, "WATCH_SECONDS", 0.02),
    (agent_module, "BEAT_SECONDS", 0.2),
    (peer_link, "PING_SECONDS", 0.1),
    (peer_link, "PAUSE_SECONDS", 0.05),
    (conversations, "SILENT_AFTER_SECONDS", SILENT_SECONDS),
    (conversations, "STALE_SECONDS", 0.7),
    (follower, "SILENT_AFTER_SECONDS", SILENT_SECONDS),
    (peer_link, "REACH_SECONDS", 1.0),
    (launch, "REACH_SECONDS", 1.0),
    (peer_pool, "TOUCH_SECONDS", 1.0),
    (share_edits, "AWAY_SECONDS", 1.5),
    (conductor, "AWAY_SECONDS", 1.5),
    (followed_run, "RECLAIM_SECONDS", RECLAIM_SECONDS),
    (restarts, "RETURN_SECONDS", 0.1),
    (supervision, "NOTICE_SECONDS", 0.1),
    (client_module, "SILENT_AFTER_SECONDS", SILENT_SECONDS),
    (client_module, "REFUSED_PAUSE_SECONDS", 0.05),
)
"""Times of agents, and of their clients, shorter than in the product: module, name, seconds."""


class InProcessAgent:
    """One node's agent, which can be ended and started again; its trainers stay meanwhile."""

    def __init__(
        self, folder: Path, name: str, trainers: FakeSupervisor, *, address: str, cluster: Cluster, options: Options
    ) -> None:
        self.name, self.address, self.options, self.cluster = name, address, options, cluster
        self.state, self.directory = folder, folder / name
        self.live_address = ""
        self.supervisor = trainers
        self.agent: Agent | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.agent is not None

    @property
    def trainers(self) -> list[FakeTrainer]:
        """Its node's trainers that live."""
        return self.supervisor.on(self.name)

    async def start(self) -> None:
        """Start, or start again at the same address."""
        await self.bind()
        self.serve()

    async def bind(self) -> None:
        agent = Agent(self.name, self.address, state_root=self.state, cluster=self.cluster, options=self.options)
        await agent.__aenter__()
        self.agent, self.live_address = agent, agent.live_address

    def serve(self) -> None:
        assert self.agent is not None
        self._serving = asyncio.create_task(self.agent.serve(), name=f"agent {self.name}")

    async def stop(self) -> None:
        """End it as a signal does. Raises what ended it before."""
        if self.agent is not None:
            self.agent.stop()
            await self._close()

    async def kill(self) -> None:
        """End it in the middle of whatever it does."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._close()

    async def _close(self) -> None:
        agent, serving = self.agent, self._serving
        assert agent is not None and serving is not None
        self.agent = self._serving = None
        try:
            await serving
        finally:
            await agent.__aexit__(None, None, None)

    def client(self, **options: Any) -> Client:
        return PatientAsyncClient(self.address, **{"by": "tester", "timeout_seconds": HANG_SECONDS, **options})

    def run_paths(self, run: str) -> RunPaths:
        return RunPaths(self.directory / "runs" / run)


class InProcessCluster:
    """Agents by node, and all their trainers."""

    def __init__(
        self, folder: Path, nodes: Sequence[str], *, quorum: bool, tables: str, keys: Callable[[str], KeyFolder] | None,
        options: Options,
    ) -> None:  # fmt: skip
        self.trainers = FakeSupervisor()
        self.file = folder / "cluster.toml"
        addresses = dict(zip(nodes, free_addresses(len(nodes)), strict=True))
        folders = {node: keys(node) for node in nodes} if keys is not None else {}
        cluster = Cluster()
        if nodes != (NODE,):
            entries = [f"quorum = {str(quorum).lower()}\n", tables]
            for node, at in addresses.items():
                key = f'key = "{folders[node].agent().public}"\n' if node in folders else ""
                entries.append(f'[nodes.{node}]\naddress = "{at}"\n{key}')
            self.file.write_text("".join(entries), encoding="utf-8")
            cluster = cluster_file.read(self.file)
        self.agents = {
            node: InProcessAgent(
                folder / "state", node, self.trainers, address=at, cluster=cluster,
                options=dataclasses.replace(options, keys=folders.get(node), no_keys=node not in folders),
            )
            for node, at in addresses.items()
        }  # fmt: skip

    def __getitem__(self, node: str) -> InProcessAgent:
        return self.agents[node]

    def run_paths(self, node: str, run: str) -> RunPaths:
        return self.agents[node].run_paths(run)

    async def close(self) -> None:
        """End all; errors of agents and of trainers are raised."""
        ended = await asyncio.gather(*(agent.stop() for agent in self.agents.values()), return_exceptions=True)
        await self.trainers.close()
        for error in ended:
            if isinstance(error, Exception):
                raise error


@contextlib.asynccontextmanager
async def in_process_cluster(
    folder: Path, nodes: Sequence[str] = NODES, *, quorum: bool = False, tables: str = "",
    keys: Callable[[str], KeyFolder] | None = None, options: Options = Options(),  # noqa: B008  frozen
) -> AsyncIterator[InProcessCluster]:  # fmt: skip
    """Agents that run, in `folder`. `tables`: more of their cluster file; `keys`: each node's, then they are required;
    `options`: of every agent. With the one node `NODE` there is no cluster file."""
    cluster = InProcessCluster(folder, tuple(nodes), quorum=quorum, tables=tables, keys=keys, options=options)
    with contextlib.ExitStack() as stack:
        for module, name, seconds in PACE:
            stack.enter_context(patch.object(module, name, seconds))
        stack.enter_context(patch.object(agent_module, "TrainerSupervisor", lambda: cluster.trainers))
        try:
            for agent in cluster.agents.values():
                await agent.bind()  # all, or the first ones would wait until they try again
            for agent in cluster.agents.values():
                agent.serve()
            yield cluster
        finally:
            await cluster.close()


class _Loop(asyncio.SelectorEventLoop):
    """Signals are for the program that runs the tests."""

    def add_signal_handler(self, *_: Any) -> None:
        pass


class BlockingAgent:
    """An agent of a `BlockingCluster`."""

    def __init__(self, cluster: "BlockingCluster", agent: InProcessAgent) -> None:
        self._cluster, self.inner = cluster, agent
        self.name, self.directory, self.run_paths = agent.name, agent.directory, agent.run_paths

    @property
    def address(self) -> str:
        return self.inner.address

    @property
    def trainers(self) -> list[FakeTrainer]:
        """Its node's trainers that live; what is done to them is done by `call`."""
        return self.inner.trainers

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the agents' loop."""
        return self._cluster.call(function, *args)

    def client(self, **options: Any) -> BlockingClient:
        return PatientClient(self.address, **{"by": "tester", "timeout_seconds": HANG_SECONDS, **options})

    def start(self) -> None:
        self._cluster.run(self.inner.start())

    def stop(self) -> None:
        self._cluster.run(self.inner.stop())

    def kill(self) -> None:
        self._cluster.run(self.inner.kill())

    def power_off(self) -> None:
        """End it and its trainers at once, as when their machine is gone."""

        async def off() -> None:
            for trainer in self.inner.trainers:
                trainer.die()
            await self.inner.kill()

        self._cluster.run(off())


class BlockingCluster:
    """An `InProcessCluster` whose loop runs in a thread of its own, until `close`."""

    def __init__(self, folder: Path, nodes: Sequence[str] = NODES, **options: Any) -> None:
        """Take the arguments of `in_process_cluster`."""
        self._runner = asyncio.Runner(loop_factory=_Loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="agents", daemon=True)
        self._thread.start()
        self._entered = in_process_cluster(folder, nodes, **options)
        with contextlib.ExitStack() as undo:
            undo.callback(self._end_loop)
            self.inner = self.run(self._entered.__aenter__())
            undo.pop_all()
        self.agents = {node: BlockingAgent(self, agent) for node, agent in self.inner.agents.items()}

    def __getitem__(self, node: str) -> BlockingAgent:
        return self.agents[node]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    @property
    def file(self) -> Path:
        """The cluster file; agents are given it when they are made."""
        return self.inner.file

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the agents' loop."""

        async def work() -> T:
            return function(*args)

        return self.run(work())

    def client(self, node: str = NODES[0], **options: Any) -> BlockingClient:
        return self.agents[node].client(**options)

    def in_touch(self) -> None:
        """Wait until every agent has reached every other one."""
        for node in self.agents:
            with self.client(node) as client:
                until(
                    lambda c=client: all(peer.state == "connected" for peer in c.ask(m.SnapshotRequest, 0).peers),
                    20,
                    "the peers",
                )

    def run_paths(self, node: str, run: str) -> RunPaths:
        return self.agents[node].run_paths(run)

    def view(self, node: str) -> m.RunView:
        """Return the run as a node's agent has it."""
        with self.client(node) as client:
            view = run_of(client)
        assert view is not None
        return view

    def close(self) -> None:
        try:
            self.run(self._entered.__aexit__(None, None, None))
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._runner.close()


@contextlib.contextmanager
def blocking_cluster(folder: Path, nodes: Sequence[str] = NODES, **options: Any) -> Iterator[BlockingCluster]:
    """Yield a cluster made as by `in_process_cluster`, its agents in touch with each other."""
    cluster = BlockingCluster(folder, nodes, **options)
    try:
        cluster.in_touch()
        yield cluster
    finally:
        cluster.close()
