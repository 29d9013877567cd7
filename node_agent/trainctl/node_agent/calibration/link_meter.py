"""The link to another node's agent, measured over one TCP connection that their authenticated sockets agree on.

Both sides send zeros at once, as the sum of gradients does, which is plain TCP too: the agents' sockets are slower.
"""

import asyncio
import secrets
import socket
from collections.abc import Callable
from typing import Final

from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs.context import AgentContext
from trainctl.protocol.calibration.profile import LinkRate
from trainctl.protocol.client.client import Client
from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.machine.speeds import echo, exchange, round_trip
from trainctl.protocol.messages import LinkReply, LinkRequest

LINK_SECONDS: Final = 2.0
"""Time for which each side sends."""
LINK_BYTES: Final = 256_000_000
"""Bytes after which a side stops sending and receiving."""
CONNECT_SECONDS: Final = 5.0
"""Time in which the connection must be made and begin with its token."""
ANSWER_SECONDS: Final = 10.0
"""Time that the other agent has to answer, also for the end of its own side of the exchange."""


class LinkMeter:
    """Both sides of a measurement: `measured` asks another node's agent, whose `reply` takes part in one at a time."""

    def __init__(self, context: AgentContext, role: AgentRole, address_of: Callable[[str], str | None]) -> None:
        """`address_of` returns the address of another node's agent, None if it isn't in the cluster."""
        self._context, self._role, self._address_of = context, role, address_of
        self._token, self._port = "", 0
        self._task: asyncio.Task[float | None] | None = None

    async def measured(self, peer: str) -> LinkRate:
        """Return the link to another node. Raises TrainctlError, OSError or ValueError if it can't be measured."""
        address, own = self._address_of(peer), self._context
        if address is None:
            raise InvalidInputError(peer, f"not in the cluster file of {own.node}; add it there")
        keys = own.authenticator.keyring if own.authenticator is not None else None
        token = secrets.token_hex(16)
        async with Client(address, timeout_seconds=ANSWER_SECONDS, keys=keys, context=own.zmq_context) as client:
            port = (await client.ask(LinkRequest, own.node, token)).port
            received, trip = await asyncio.to_thread(_called, addresses.host(address), port, token)
            sent = (await client.ask(LinkRequest, own.node, token)).bytes_per_second
        if sent is None:
            raise RefusedError(f"the exchange with {peer} broke off")
        return LinkRate(peer, sent, received, trip)

    # ------------------------------------------------------------ the side that is asked

    async def reply(self, request: LinkRequest) -> LinkReply:
        """Listen for the connection, or say what arrived over it. Raises RefusedError, InvalidInputError or OSError."""
        if request.token == self._token and self._task is not None:
            return LinkReply(rid=request.rid, port=self._port, bytes_per_second=await asyncio.shield(self._task))
        if not self._role.is_idle:
            raise RefusedError(f"{self._context.node} takes part in a run")
        self._role.check_no_work()
        host = addresses.host(self._context.address)
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1)
        server.settimeout(CONNECT_SECONDS)
        self._token, self._port = request.token, server.getsockname()[1]
        self._role.is_calibrating = True  # no run starts meanwhile
        self._task = asyncio.create_task(self._listen(server, request.token), name="link")
        return LinkReply(rid=request.rid, port=self._port)

    async def close(self) -> None:
        """End the measurement that this node was asked for; its thread ends with the other side, or in time."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _listen(self, server: socket.socket, token: str) -> float | None:
        try:
            with server:
                return await asyncio.to_thread(_answered, server, token.encode())
        finally:
            self._role.is_calibrating = False


def _answered(server: socket.socket, token: bytes) -> float | None:
    """Return the bytes per second received over the first connection; None if it doesn't begin with the token, or
    breaks off."""
    try:
        with server.accept()[0] as connection:
            connection.settimeout(CONNECT_SECONDS)
            received = b""
            while len(received) < len(token) and (part := connection.recv(len(token) - len(received))):
                received += part
            if not secrets.compare_digest(received, token):
                return None
            echo(connection)
            return exchange(connection, LINK_SECONDS, LINK_BYTES)
    except (OSError, ValueError):
        return None


def _called(host: str, port: int, token: str) -> tuple[float, float]:
    """Return the bytes per second received, and the seconds of a round trip. Raises OSError or ValueError."""
    with socket.create_connection((host, port), timeout=CONNECT_SECONDS) as connection:
        connection.sendall(token.encode())
        trip = round_trip(connection)
        return exchange(connection, LINK_SECONDS, LINK_BYTES), trip
