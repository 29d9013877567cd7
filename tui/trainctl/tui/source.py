"""What the screens follow: every agent of a cluster, with requests and commands to the one that conducts.

The screens see it as a `Source`, so that a recorded one can stand in for the network.
"""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import TracebackType
from typing import Any, Protocol, Self

from trainctl.protocol import messages as m
from trainctl.protocol.client import Client, Connection
from trainctl.protocol.cluster_client import attach_cluster
from trainctl.protocol.errors import TrainctlError

Item = m.Snapshot | m.Live | m.Heartbeat | Connection


class Source(Protocol):
    """The part of an agent's client that the full-screen program uses; errors are that client's."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Item], None]: ...

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[m.CommandReply]: ...

    async def snapshot(self, columns: int = 120, run: str | None = None) -> m.Snapshot: ...

    async def history(
        self, run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> m.History: ...

    async def runs(self) -> m.Runs: ...

    async def events(
        self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False
    ) -> m.Events: ...


Connect = Callable[[], Source]


class ClusterSource:
    """The agents of a cluster, found from the address of any of them."""

    def __init__(self, address: str, *, by: str) -> None:
        self.address, self._by = address, by
        self._clients = contextlib.AsyncExitStack()
        self._client = Client(address, by=by)
        self._addresses: dict[str, str] = {}  # of the other nodes' agents

    async def __aenter__(self) -> Self:
        self._first = self._client = await self._clients.enter_async_context(Client(self.address, by=self._by))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._clients.aclose()

    async def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Item], None]:
        """(node, message) as `attach_cluster` gives them; requests go to the agent whose snapshot came last."""
        async with contextlib.aclosing(attach_cluster(self.address, columns, by=self._by)) as items:
            async for node, item in items:
                if isinstance(item, m.Snapshot):
                    self._addresses |= {peer.node: peer.address for peer in item.peers}
                    await self._turn_to(item.node)
                yield node, item

    async def _turn_to(self, node: m.NodeView) -> None:
        """Ask the agent of `node` from here on: over the line there is where that leads to it (through a tunnel its
        own address may not), else at its own address."""
        if node.address == self._client.address:
            return
        with contextlib.suppress(TrainctlError):
            if (await self._first.snapshot(0)).node.boot == node.boot:
                self._client = self._first
                return
        self._client = await self._clients.enter_async_context(Client(node.address, by=self._by))

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[m.CommandReply]:
        """Sent to the agent that conducts, but for `promote`: that is for the node's own, the lead's may be gone."""
        address = self._addresses.get(options.get("node") or "") if verb == "promote" else None
        if address is None or address == self._client.address:
            return self._client.command(verb, args, **options)
        return self._elsewhere(address, verb, args, **options)

    async def _elsewhere(
        self, address: str, verb: str, args: dict[str, Any], **options: Any
    ) -> AsyncIterator[m.CommandReply]:
        async with Client(address, by=self._by) as client:
            async for reply in client.command(verb, args, **options):
                yield reply

    async def snapshot(self, columns: int = 120, run: str | None = None) -> m.Snapshot:
        return await self._client.snapshot(columns, run)

    async def history(
        self, run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> m.History:
        return await self._client.history(run, metrics, first_step, last_step, columns)

    async def runs(self) -> m.Runs:
        return await self._client.runs()

    async def events(
        self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False
    ) -> m.Events:
        return await self._client.events(run, after_id, limit, newest)
