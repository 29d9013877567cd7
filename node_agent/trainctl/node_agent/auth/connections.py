"""A listening socket's connections: their start and end, missing keys, and which connection each identity uses.

A client may claim any identity as it connects, even one that another had before. So no one is answered by identity
alone, but as a caller: an identity and the number of the connection over which it spoke.
"""

import contextlib
import dataclasses
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from trainctl.protocol.wire.handshake import MECHANISM_MISMATCH

IDENTITY_BYTES = 5
"""Bytes of an identity that the socket gave a connection: a zero and a growing number."""
NUMBER_BYTES = 8
_NOBODY = bytes(NUMBER_BYTES)


_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
KEYLESS, MISTAKEN, SILENT = "it has no key", "it expects another agent's key", "it presented no key"
"""Why a connection failed. The last is of one that hung up or stayed silent: also of a client without keys, which often
hangs up before it has said that it has none."""


@dataclasses.dataclass
class _Connection:
    number: int  # from 1, never used again
    opened_monotonic: float
    identity: bytes = b""  # empty: it hasn't spoken yet
    public: str = ""


class Callers:
    """Belongs to one socket. Connections are distinguished by their descriptors, the `zmq.SRCFD` of messages, which the
    system uses again."""

    def __init__(self) -> None:
        self._open: dict[int, _Connection] = {}  # by descriptor
        self._speakers: dict[bytes, _Connection] = {}  # by identity
        self.of_key: Counter[str] = Counter()  # connections that have spoken
        self._last_number = 0

    def opened(self, descriptor: int) -> None:
        self.closed(descriptor)
        self._last_number += 1
        self._open[descriptor] = _Connection(self._last_number, time.monotonic())

    def closed(self, descriptor: int) -> None:
        connection = self._open.pop(descriptor, None)
        if connection is not None:
            self._speakers.pop(connection.identity, None)
            self._count(connection.public, -1)

    def silent(self, before: float) -> list[int]:
        """Descriptors of connections that were opened before a time (monotonic), and have never spoken."""
        return [
            descriptor
            for descriptor, connection in self._open.items()
            if not connection.identity and connection.opened_monotonic < before
        ]

    def _count(self, public: str, connections: int) -> None:
        if public:
            self.of_key[public] += connections
            self.of_key += Counter()  # without those at 0

    def speak(self, identity: bytes, descriptor: int, public: str) -> bytes | None:
        """The caller that a message is of, None for one that chose its identity. What still comes from a connection
        that has ended is of a caller that isn't answered."""
        if len(identity) != IDENTITY_BYTES or identity[:1] != b"\0":
            return None
        connection = self._open.get(descriptor)
        if connection is None or _is_older(identity, connection.identity):
            return identity + _NOBODY
        if self._speakers.get(identity, connection) is not connection:
            return None
        self._speakers.pop(connection.identity, None)
        if public != connection.public:
            self._count(connection.public, -1)
            self._count(public, 1)
        connection.identity, connection.public = identity, public
        self._speakers[identity] = connection
        return identity + connection.number.to_bytes(NUMBER_BYTES)

    def find(self, caller: bytes) -> tuple[bytes, str] | None:
        """Identity and key of a caller whose connection is open still."""
        identity, number = caller[:-NUMBER_BYTES], int.from_bytes(caller[-NUMBER_BYTES:])
        connection = self._speakers.get(identity)
        return (identity, connection.public) if connection is not None and connection.number == number else None


def _is_older(identity: bytes, than: bytes) -> bool:
    """Return whether `identity` is the older of two with a descriptor: their numbers grow, and wrap around."""
    if not than:
        return False
    ahead = (int.from_bytes(than[1:]) - int.from_bytes(identity[1:])) % 2**32
    return 0 < ahead < 2**31


class ConnectionLog:
    """Log of one socket's connections, from before it is bound until `close`, which comes before the socket's own.

    `read` reports what has happened, in order; an end is there to be read before the socket lets another connection
    have its identity. Read often: the socket's connections wait when 2,000 events are unread.
    """

    def __init__(self, context: Any, socket: Any, callers: Callers, turned_away: Callable[[str], None]) -> None:
        """`turned_away` is called with the reason for each connection that shows no key."""
        self._socket, self._callers, self._turned_away = socket, callers, turned_away
        address = f"inproc://connections-{secrets.token_hex(8)}"
        socket.monitor(address, _EVENTS)
        self._events = context.socket(zmq.PAIR, socket_class=zmq.Socket)
        self._events.connect(address)

    def read(self) -> None:
        """Tell what has happened since."""
        with contextlib.suppress(zmq.Again):
            while True:
                message = parse_monitor_message(self._events.recv_multipart(zmq.DONTWAIT))
                self._tell(int(message["event"]), int(message["value"]))

    def _tell(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._callers.opened(value)
        elif event == zmq.EVENT_DISCONNECTED:
            self._callers.closed(value)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            self._turned_away(KEYLESS if value == MECHANISM_MISMATCH else MISTAKEN)
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            self._turned_away(SILENT)

    def close(self) -> None:
        if self._events.closed:
            return
        self.read()
        if not self._socket.closed:
            self._socket.disable_monitor()  # first: it would wait for the reader
        self._events.close(linger=0)
