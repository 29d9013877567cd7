"""What a listening socket tells of its connections: that they come and go, and that some show no key."""

import contextlib
import secrets
from typing import Any, Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from trainctl.protocol.wire.handshake import MECHANISM_MISMATCH

_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
KEYLESS, MISTAKEN, SILENT = "it has no keys", "it expects another agent's key", "it showed no key"
"""Why a connection came to nothing. The last is of one that hung up or was silent: also of a client without keys, which
hangs up when it sees that they are wanted, often before it has said that it has none."""


class Listener(Protocol):
    """Who is told. Descriptors are those of the messages' `zmq.SRCFD`."""

    def opened(self, descriptor: int) -> None: ...
    def closed(self, descriptor: int) -> None: ...
    def turned_away(self, why: str) -> None: ...


class ConnectionLog:
    """Of one socket, from before it is bound until `close`, which comes before the socket's own.

    What has happened is told by `read`, in order; an end is there to be read before the socket lets another connection
    have its identity. Read often: the socket's connections wait when 2,000 events are unread.
    """

    def __init__(self, context: Any, socket: Any, listener: Listener) -> None:
        self._socket, self._listener = socket, listener
        address = f"inproc://connections-{secrets.token_hex(8)}"
        socket.monitor(address, _EVENTS)
        self._events = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._events.connect(address)

    def read(self) -> None:
        """Tell what has happened since."""
        with contextlib.suppress(zmq.Again):
            while True:
                told = parse_monitor_message(self._events.recv_multipart(zmq.DONTWAIT))
                self._tell(int(told["event"]), int(told["value"]))

    def _tell(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._listener.opened(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._listener.closed(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._listener.turned_away(KEYLESS if value == MECHANISM_MISMATCH else MISTAKEN)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._listener.turned_away(SILENT)

    def close(self) -> None:
        if self._events.closed:
            return
        self.read()
        if not self._socket.closed:
            self._socket.disable_monitor()  # first: it would wait for whoever reads
        self._events.close(linger=0)
