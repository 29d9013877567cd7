"""Reasons of failed handshakes: the other side refuses this side's key, requires keys, or has none."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from trainctl.protocol.errors import START_ONE, NotAuthorisedError, NotConnectedError, UnreachableError
from trainctl.protocol.security.keyring import Credentials
from trainctl.protocol.wire.sockets import end_tasks

MECHANISM_MISMATCH = 0x11000002
"""Reason of HANDSHAKE_FAILED_PROTOCOL: one side has keys and the other none."""
QUICK_SECONDS = 1.5
"""Seconds before which a failed handshake was rejected by the other side; a later failure means that it never
answered."""
_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Handshakes:
    """The verdict over a sequence of a connecting socket's events. Pure: time comes with each event."""

    def __init__(self, address: str, credentials: Credentials | None) -> None:
        self.address, self._credentials = address, credentials
        self._connected_at, self._broken_off = 0.0, 0
        self.has_connected = False
        """True once something has accepted a connection."""
        self.has_broken_off = False
        """True once something has ended a connection that no agent had taken."""
        self.has_succeeded = False
        """True once an agent has taken a connection."""

    def take(self, event: int, value: int, now: float) -> NotAuthorisedError | None:
        """Return why there will be no connection, once that is certain."""
        if event == zmq.EVENT_CONNECTED:
            self._connected_at, self.has_connected = now, True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._broken_off, self.has_succeeded = 0, True
        elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return NotAuthorisedError(self._unknown())
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL and value == MECHANISM_MISMATCH:
            return NotAuthorisedError(self._mismatch())
        elif now - self._connected_at < QUICK_SECONDS and self._credentials is None:
            self.has_broken_off = True
        elif self._credentials is not None and now - self._connected_at < QUICK_SECONDS:
            self._broken_off += 1  # once may be an agent that ends
            if self._broken_off > 1:
                return NotAuthorisedError(self._wrong_server())
        return None

    def _unknown(self) -> str:
        if self._credentials is None:
            return f"{self.address}: the agent requires a key; create one with: trainctl keys new"
        own = self._credentials.own
        return (
            f"{self.address}: the agent has not authorised {own.name}'s key; on that machine, run: "
            f"trainctl keys authorize {own.name} '{own.public}' --role {self._credentials.role}"
        )

    def _mismatch(self) -> str:
        if self._credentials is not None:
            return f"{self.address}: the agent uses no keys, but this client expects key {self._credentials.server}"
        return (
            f"{self.address}: the agent requires keys: put its key into the cluster file ([nodes.NAME] key), "
            "or give it with --server-key or $TRAINCTL_SERVER_KEY"
        )

    def _wrong_server(self) -> str:
        assert self._credentials is not None
        known = self._credentials.server
        return f"{self.address}: the agent's key differs from the one that this client expects ({known})"


class HandshakeWatch:
    """Watches one asyncio socket, which is not connected yet, for as long as `start` to `close`."""

    def __init__(
        self,
        socket: Any,
        address: str,
        credentials: Credentials | None,
        tell: Callable[[NotAuthorisedError], None] = lambda _: None,
    ) -> None:
        """`tell` is called with each verdict."""
        self._socket, self._handshakes, self._tell = socket, Handshakes(address, credentials), tell
        self._monitor = socket.get_monitor_socket(_EVENTS)
        self._verdict = _new_verdict()

    def start(self) -> None:
        self._task = asyncio.create_task(self._watch(), name="trainctl-handshakes")

    @property
    def has_met_agent(self) -> bool:
        """Return whether an agent has ever taken a connection; until then, what is sent may go nowhere."""
        return self._handshakes.has_succeeded

    def no_answer(self) -> UnreachableError:
        """Return why nothing came, as far as is known where no verdict is."""
        address = self._handshakes.address
        if not self._handshakes.has_connected:
            return NotConnectedError(f"no agent at {address}: {START_ONE}")
        if self._handshakes.has_broken_off:
            return UnreachableError(f"{address}: another program answers there, no agent: check the port")
        remedy = "check that process and the port"
        return UnreachableError(
            f"{address}: something listens there and says nothing, an agent that hangs or another program: {remedy}"
        )

    @property
    def verdict(self) -> NotAuthorisedError | None:
        """Return why there is no connection, if that is certain."""
        return self._verdict.result() if self._verdict.done() else None

    async def race(self, work: "asyncio.Future[Any]", seconds: float) -> None:
        """Wait for `work`, which is cancelled if it doesn't come. Raises TimeoutError, or NotAuthorisedError as soon
        as it is certain that nothing will come."""
        try:
            await asyncio.wait({work, self._verdict}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not work.done():
                work.cancel()
        if not work.cancelled() and work.done():
            return
        if self._verdict.done():
            raise self._verdict.result()
        raise TimeoutError

    async def _watch(self) -> None:
        while True:
            message = parse_monitor_message(await self._monitor.recv_multipart())
            event = int(message["event"])
            verdict = self._handshakes.take(event, int(message["value"]), time.monotonic())
            if verdict is not None:
                self._verdict = self._verdict if not self._verdict.done() else _new_verdict()
                self._verdict.set_result(verdict)
                self._tell(verdict)
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED and self._verdict.done():
                self._verdict = _new_verdict()

    async def close(self) -> None:
        try:
            await end_tasks([self._task])
        finally:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)


def _new_verdict() -> "asyncio.Future[NotAuthorisedError]":
    return asyncio.get_running_loop().create_future()
