"""Live messages out: each gets this boot's next sequence number and is kept a while for those who missed it.

The publishing socket keeps in memory what each subscriber asks for, so each may say little.
"""

import contextlib
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import zmq

from trainctl.protocol.messages import TOPICS, Heartbeat, Live
from trainctl.protocol.wire import codec

MOST_SAID = 32
"""Most messages of one connection, subscriptions included; this program's client sends one."""
MOST_BYTES = 64
"""Most bytes of one such message; the topics have five."""
MOST_OF_KEY = 32
"""Most connections of one key that subscribe."""
MOST_KNOWN = 4096
_Caller = tuple[int, int, Any]
"""A connection: its descriptor, which the system uses again, the number of its socket, and where it comes from."""


class SubscriberLimits:
    """Counts what the connections of an XPUB socket say, and hangs up on who says too much.

    The socket takes in what was said whenever it is used, and libzmq has no limit of its own for it.
    """

    def __init__(self, publishing: Any) -> None:
        self._socket = publishing
        publishing.setsockopt(zmq.XPUB_VERBOSER, 1)  # report what another one has said before, too
        self._said: Counter[_Caller] = Counter()
        self._callers: dict[str, set[_Caller]] = {}  # by key

    def hear(self) -> None:
        """Take in what was said; after each use of the socket."""
        while True:
            try:
                frame = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            with contextlib.suppress(zmq.ZMQError, OSError):  # it has gone
                self._count(frame.get(zmq.SRCFD), len(frame), _key(frame))

    def _count(self, descriptor: int, size: int, key: str) -> None:
        with _connection(descriptor) as one:
            caller = _caller(descriptor, one)
            self._said[caller] += 1 if size <= MOST_BYTES else MOST_SAID + 1
            # The descriptor may be another connection's by now; if it is one of this socket's it comes again.
            if (self._said[caller] > MOST_SAID or self._has_many(key, caller)) and self._is_of(one):
                one.shutdown(socket.SHUT_RDWR)
        if len(self._said) > MOST_KNOWN:
            self._said = Counter({caller: count for caller, count in self._said.items() if _is_there(caller)})

    def _has_many(self, key: str, caller: _Caller) -> bool:
        callers = self._callers.setdefault(key, set()) if key else set()
        callers.add(caller)
        if len(callers) > MOST_OF_KEY:
            callers.intersection_update([*filter(_is_there, callers)])
        return len(callers) > MOST_OF_KEY

    def _is_of(self, connection: socket.socket) -> bool:
        endpoint, at = self._socket.LAST_ENDPOINT.decode().rstrip("\0"), connection.getsockname()
        return bool(endpoint == f"ipc://{at}" if isinstance(at, str) else endpoint.endswith(f":{at[1]}"))


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket]:
    """To look at one that is libzmq's, and stays so. Raises OSError if it is no socket."""
    looked_at = socket.socket(fileno=descriptor)
    try:
        yield looked_at
    finally:
        looked_at.detach()


def _key(frame: Any) -> str:
    with contextlib.suppress(zmq.ZMQError):
        return str(frame.get("User-Id"))
    return ""


def _caller(descriptor: int, connection: socket.socket) -> _Caller:
    return descriptor, os.fstat(descriptor).st_ino, connection.getpeername()


def _is_there(caller: _Caller) -> bool:
    try:
        with _connection(caller[0]) as one:
            return _caller(caller[0], one) == caller
    except OSError:
        return False


KEPT_MESSAGES = 10_000
"""Newest live messages that can be requested again; a client that missed more attaches again from the record."""


class Publisher:
    """The one writer of an XPUB socket; `seq` is the last number given out."""

    def __init__(self, socket: Any, boot: str, listeners: Sequence[Callable[[Live], object]] = ()) -> None:
        self._socket, self._limits, self.boot, self.seq = socket, SubscriberLimits(socket), boot, 0
        self._kept: deque[Live] = deque(maxlen=KEPT_MESSAGES)
        self.listeners = [*listeners]
        """Each is given every message that is published, in this order."""

    @property
    def socket(self) -> Any:
        """None while none is bound."""
        return self._socket

    def turn_to(self, socket: Any) -> Any:
        """Publish on another socket from here on, on none if None; gives the one before. Numbers continue."""
        before, self._socket = self._socket, socket
        if socket is not None:
            self._limits = SubscriberLimits(socket)
        return before

    def publish(self, message: Live) -> None:
        """Number, keep and send. A subscriber that is too slow loses it and notices by the number."""
        self.seq += 1
        numbered = msgspec.structs.replace(message, boot=self.boot, seq=self.seq)
        self._kept.append(numbered)
        self._send(numbered)
        for heard in self.listeners:
            heard(numbered)

    def beat(self, beat: Heartbeat) -> None:
        """Send a heartbeat carrying the last number given out."""
        self._send(msgspec.structs.replace(beat, boot=self.boot, seq=self.seq))

    def again(self, first_seq: int, last_seq: int, limit: int) -> tuple[Live, ...] | None:
        """The messages first..last, at most `limit` of them, or None if the first is no longer kept."""
        if not self._kept or first_seq < self._kept[0].seq or first_seq > self.seq:
            return None
        skip = first_seq - self._kept[0].seq
        count = min(last_seq - first_seq + 1, limit, len(self._kept) - skip)
        return tuple(self._kept[skip + index] for index in range(count))

    def _send(self, message: Live | Heartbeat) -> None:
        if self._socket is None:
            return  # it is just being bound again: subscribers will see the gap
        with contextlib.suppress(zmq.Again):  # no room for any subscriber: they will see the gap
            self._socket.send_multipart([TOPICS[type(message)], codec.encode(message)], zmq.DONTWAIT)
        self._limits.hear()
