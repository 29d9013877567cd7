"""Messages between a trainer and its reducers, or the server that forks them: msgpack behind its length, on a socket
pair.

Each order but `Prepare` is answered once, in order; descriptors travel beside them.
"""

import contextlib
import os
import select
import socket
from collections.abc import Sequence
from typing import Literal

import msgspec

from trainctl.protocol.messages import Engine

Words = Literal["float32", "int32"]
_MAX_DESCRIPTORS = 2
_LENGTH_BYTES = 4


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """Import an engine, so that joining is quick."""

    engine: Engine


class Join(msgspec.Struct, frozen=True, tag=True):
    """Connect to the other ranks. The first descriptor is the shared buffer; a second is the socket, bound and
    listening, of gloo's first rank."""

    engine: Engine
    index: int  # place among the ranks
    endpoints: tuple[tuple[str, ...], ...]  # host:port, of each rank in the order of index
    interface: str  # network interface by name
    deadline_seconds: float  # the process ends if it has not joined by then
    size_bytes: int  # of the shared buffer
    chunk_words: int  # summed at a time
    generation: str = ""  # shown in the process's title


class Reduce(msgspec.Struct, frozen=True, tag=True):
    """Replace words of the shared buffer by their sum over all ranks."""

    words: Words
    start: int
    count: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Make a reducer; the descriptor is its end of a channel."""

    number: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """Kill a reducer if it still lives, and reap it: until then its process id is its own."""

    number: int


class Done(msgspec.Struct, frozen=True, tag=True):
    """The order was carried out."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It was not, and the reducer ends."""

    reason: str  # one line
    peer: int | None = None  # place of the rank that it is about, if known


class Born(msgspec.Struct, frozen=True, tag=True):
    """A reducer runs."""

    number: int
    pid: int


class Gone(msgspec.Struct, frozen=True, tag=True):
    """A reducer has been reaped."""

    number: int
    status: int  # negative: the signal that ended it


Order = Prepare | Join | Reduce | Fork | Release
Answer = Done | Failed | Born | Gone
_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class Channel:
    """One end. Each direction is used by one thread at a time."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: Order | Answer, descriptors: Sequence[int] = ()) -> None:
        """Raises OSError if no one is at the other end any more."""
        body = msgspec.msgpack.encode(message)
        frame = len(body).to_bytes(_LENGTH_BYTES, "little") + body
        sent = socket.send_fds(self._socket, [frame], list(descriptors)) if descriptors else 0
        self._socket.sendall(frame[sent:])

    def next_order(self) -> tuple[Order, list[int]]:
        """Return an order and the descriptors that came with it. Raises EOFError at the end."""
        body, descriptors = self._receive()
        return _ORDERS.decode(body), descriptors

    def next_answer(self, timeout_seconds: float | None) -> Answer:
        """Raises EOFError if the reducer has ended, TimeoutError if it takes longer (then the channel is of no use any
        more)."""
        self._socket.settimeout(timeout_seconds)
        body, _ = self._receive()
        return _ANSWERS.decode(body)

    def has_answer(self, seconds: float) -> bool:
        """Return whether there is something to read, the end included, waiting so long for it."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _LENGTH_BYTES, _MAX_DESCRIPTORS)
            head += self._exactly(_LENGTH_BYTES - len(head)) if head else b""
        except ConnectionError:
            head, descriptors = b"", []
        if not head:
            raise EOFError
        try:
            return self._exactly(int.from_bytes(head, "little")), descriptors
        except EOFError:
            close_all(descriptors)
            raise

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self._socket.recv(count - len(parts))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
