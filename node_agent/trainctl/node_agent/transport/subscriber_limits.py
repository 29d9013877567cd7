"""Who listens to a socket that publishes: it keeps in memory what each asks for, so each may say little."""

import contextlib
import socket
from collections import Counter
from collections.abc import Iterator
from typing import Any

import zmq

MOST_SAID = 32
"""Most messages of one connection, subscriptions included; this program's client sends one."""
MOST_BYTES = 64
"""Most bytes of one such message; the topics have five."""
MOST_KNOWN = 4096
_Caller = tuple[int, Any]
"""A connection: its descriptor and where it comes from."""


class SubscriberLimits:
    """Counts what the connections of an XPUB socket say, and hangs up on who says too much.

    The socket takes in what was said whenever it is used, and libzmq has no limit of its own for it.
    """

    def __init__(self, publishing: Any) -> None:
        self._socket = publishing
        publishing.setsockopt(zmq.XPUB_VERBOSER, 1)  # report what another one has said before, too
        self._said: Counter[_Caller] = Counter()

    def hear(self) -> None:
        """Take in what was said; after each use of the socket."""
        while True:
            try:
                frame = self._socket.recv(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return
            with contextlib.suppress(zmq.ZMQError, OSError):  # it has gone
                self._count(frame.get(zmq.SRCFD), len(frame))

    def _count(self, descriptor: int, size: int) -> None:
        with _connection(descriptor) as one:
            caller = descriptor, one.getpeername()
            self._said[caller] += 1 if size <= MOST_BYTES else MOST_SAID + 1
            # The descriptor may be another connection's by now; if it is one of this socket's it comes again.
            if self._said[caller] > MOST_SAID and one.getsockname()[1] == self._port:
                one.shutdown(socket.SHUT_RDWR)
        if len(self._said) > MOST_KNOWN:
            self._said = Counter({caller: count for caller, count in self._said.items() if _is_there(caller)})

    @property
    def _port(self) -> int | None:
        name, _, port = self._socket.LAST_ENDPOINT.decode().rstrip("\0").rpartition(":")
        return int(port) if name and port.isdecimal() else None


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[socket.socket]:
    """To look at one that is libzmq's, and stays so. Raises OSError if it is no socket."""
    looked_at = socket.socket(fileno=descriptor)
    try:
        yield looked_at
    finally:
        looked_at.detach()


def _is_there(caller: _Caller) -> bool:
    try:
        with _connection(caller[0]) as one:
            return bool(one.getpeername() == caller[1])
    except OSError:
        return False
