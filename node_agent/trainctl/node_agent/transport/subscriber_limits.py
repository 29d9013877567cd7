"""Who listens to a socket that publishes: it keeps in memory what each asks for, so each may say little."""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import zmq

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
