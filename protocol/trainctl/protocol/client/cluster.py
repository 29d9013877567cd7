"""A client that follows a whole cluster: all that the lead's agent publishes, and the state of the other machines.

async for node, message in attach_cluster("tcp://127.0.0.1:7474"):
    print(node, type(message).__name__)
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

import zmq.asyncio

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import DEFAULT_TIMEOUT_SECONDS, Client, Connection
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.security.keyring import Keyring, current

Item = m.Snapshot | m.NodeView | m.Live | m.Heartbeat | Connection
RETRY_SECONDS = 1.0
WAITING_BATCHES = 256


async def attach_cluster(
    address: str, columns: int = 120, *, by: str | None = None, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    keys: Keyring | None = None,
) -> AsyncGenerator[tuple[str, Item], None]:  # fmt: skip
    """(node, message): of the agent that leads the active run all that `Client.attach` gives, of every other agent
    of its cluster what it says of itself (NodeView), the host readings, the heartbeats, the alerts and how the line to
    it is.

    `address` is that of any agent of the cluster. Where no run is active, its agent counts as the leading one; when
    another one begins to lead, that one's snapshot follows. The node is empty until the agent has sent its name.
    Raises what `Client.attach` raises for the leading agent.
    """
    cluster = _Cluster(address, columns, by, timeout_seconds, keys or current())
    try:
        cluster.watch(address)
        while True:
            watch, items = await cluster.queue.get()
            for item in items:
                if cluster.watches.get(watch.address) is watch:
                    for piece in cluster.take(watch, item):
                        yield cluster.names.get(watch.address, ""), piece
    finally:
        await cluster.close()


class _Watch:
    """One agent's attachment, run by a task of its own."""

    def __init__(self, address: str, task: "asyncio.Task[None] | None" = None) -> None:
        self.address, self.task = address, task


class _Cluster:
    def __init__(self, address: str, columns: int, by: str | None, timeout_seconds: float, keys: Keyring) -> None:
        self.queue: asyncio.Queue[tuple[_Watch, Sequence[Item | TrainctlError]]] = asyncio.Queue(WAITING_BATCHES)
        self.watches: dict[str, _Watch] = {}  # by the agent's address
        self.names: dict[str, str] = {}  # address -> node
        self._main, self._columns, self._by, self._timeout_seconds = address, columns, by, timeout_seconds
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._is_active = False
        self._run, self._term = "", 0  # that was last seen to be led
        self._old: list[asyncio.Task[None]] = []

    def watch(self, address: str) -> None:
        """Attach to an agent, again if it was attached to already."""
        before = self.watches.get(address)
        if before is not None and before.task is not None:
            before.task.cancel()
            self._old.append(before.task)
        watch = self.watches[address] = _Watch(address)
        watch.task = asyncio.create_task(self._attach(watch), name=f"trainctl-cluster-{address}")

    async def _attach(self, watch: _Watch) -> None:
        columns = self._columns if watch.address == self._main else 0
        while True:
            try:
                async with (
                    self._client(watch.address) as client,
                    contextlib.aclosing(client.attach_at_once(columns)) as batches,
                ):
                    async for batch in batches:
                        await self.queue.put((watch, batch))
            except TrainctlError as error:
                await self.queue.put((watch, [error]))
            await asyncio.sleep(RETRY_SECONDS)

    def _client(self, address: str) -> Client:
        return Client(
            address, by=self._by, timeout_seconds=self._timeout_seconds, keys=self._keys, context=self._context
        )

    def take(self, watch: _Watch, item: Item | TrainctlError) -> list[Item]:
        """What of it is to be passed on. Raises the error that the leading agent's attachment ended with."""
        is_main = watch.address == self._main
        if isinstance(item, TrainctlError):
            if is_main:
                raise item
            return [Connection("silent", time.monotonic(), str(item))]
        if isinstance(item, m.Snapshot):
            self._meet(watch.address, item)
        view = item.run if isinstance(item, m.Snapshot) else item if isinstance(item, m.RunView) else None
        view = view if view is not None and view.kind == "hosted" else None  # a guest says nothing of who leads
        if self._has_moved(watch.address, view):
            return []
        if is_main:
            self._is_active = self._is_active if view is None else view.state in m.ACTIVE_RUN_STATES
            if view is not None:
                self._run, self._term = view.run, view.generation.term
            return [item]
        match item:
            case m.Snapshot():
                told = item.alerts or m.Alerts(node=item.node.node)
                return [item.node, told, *([item.node.host] if item.node.host is not None else [])]
            case m.HostReading() | m.Heartbeat() | m.Alerts() | m.NodeView() | Connection():
                return [item]
            case m.RunView() | m.StepCommitted() | m.RankStep() | m.Event() | m.Sample():
                return []  # the lead's to tell

    def _meet(self, address: str, snapshot: m.Snapshot) -> None:
        """Learn the names, and attach to agents that are new."""
        self.names[address] = snapshot.node.node
        for peer in snapshot.peers:
            self.names[peer.address] = peer.node
            if peer.address not in self.watches:
                self.watch(peer.address)

    def _has_moved(self, address: str, view: m.RunView | None) -> bool:
        """Whether another agent than was thought leads; then that one is attached to in full."""
        if view is None or view.state not in m.ACTIVE_RUN_STATES:
            return False
        conducts = view.lead == self.names.get(address)
        if address == self._main:
            found = [at for at, node in self.names.items() if node == view.lead] if not conducts else []
        else:
            newer = view.run == self._run and view.generation.term > self._term  # promoted; the one before may be gone
            found = [address] if conducts and (newer or not self._is_active) else []
        if not found or found[0] == self._main:
            return False
        before, self._main, self._is_active = self._main, found[0], False
        self.watch(before)
        self.watch(self._main)
        return True

    async def close(self) -> None:
        """End all attachments."""
        tasks = [*self._old, *(watch.task for watch in self.watches.values() if watch.task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)
