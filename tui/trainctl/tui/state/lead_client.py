"""The agent that conducts the run, whichever that comes to be: what it says, and a client for it."""

import contextlib
import time
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from trainctl.protocol.messages import NodeView, Snapshot
from trainctl.protocol.wire.attachment import Connection

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client
    from trainctl.protocol.client.cluster import Item


ATTEND_SECONDS = 5.0
"""Seconds between two messages of a viewer that it is there."""


async def conducting(client: "Client") -> "AsyncGenerator[Item, None]":
    """Return what `Client.attach` gives, of the agent that `client` is connected to until another one conducts, then of
    that one, which a Snapshot begins; not that a line is being made, which says nothing once there was one."""
    from trainctl.protocol.client.cluster import attach_cluster  # ZeroMQ: not for `--help`

    conducts = ""
    items = attach_cluster(client.address, 0, by=client.by, timeout_seconds=client.timeout_seconds, keys=client.keys)
    async with contextlib.aclosing(items):
        async for node, item in items:
            if isinstance(item, Snapshot) and node != conducts:
                conducts = node
                yield Connection("connected", time.monotonic())
            of_another = node not in ("", conducts) or isinstance(item, NodeView)  # just conducted: it is one of them
            if not of_another and getattr(item, "state", "") != "connecting":
                yield item


def client_like(client: "Client", address: str) -> "Client":
    """Return one for the agent at `address`, not opened yet, that says and knows what `client` does."""
    return type(client)(address, by=client.by, timeout_seconds=client.timeout_seconds, keys=client.keys)


class LeadClients:
    """Clients by the node that conducts; as a context, it closes those that it has opened."""

    def __init__(self, client: "Client", node: str) -> None:
        """Take the client for `node`, which stays its owner's."""
        self._first, self._node = client, node
        self._opened, self._stack = client, contextlib.AsyncExitStack()

    async def of(self, node: NodeView) -> "Client":
        """Return the client for a node's agent."""
        if node.node == self._node:
            return self._first
        if self._opened.address != node.address:
            await self._stack.aclose()
            self._opened = await self._stack.enter_async_context(client_like(self._first, node.address))
        return self._opened

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
