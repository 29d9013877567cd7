"""A connection's round trip, and how fast it carries bytes in both directions at once, as the sums of a group do."""

import socket
import statistics
import threading
import time
from typing import Final

EXCHANGE_SECONDS: Final = 3.0
"""Time for which each side sends."""
EXCHANGE_BYTES: Final = 4 << 30
"""Bytes after which a side stops sending."""
SILENT_SECONDS: Final = 10.0
"""Time without a byte after which the other side counts as gone."""
LATE_SECONDS: Final = 3.0
"""Time after its own sending for which a side still receives."""
ROUNDS: Final = 20
"""Round trips that are timed."""
_CHUNK: Final = bytes(1 << 20)


def exchange(connection: socket.socket, seconds: float = EXCHANGE_SECONDS, most_bytes: int = EXCHANGE_BYTES) -> float:
    """Send for so many seconds, at most `most_bytes`, while the other side does the same; bytes per second received.
    Both sides call it. It receives no more than `most_bytes`, and for no more than LATE_SECONDS after it has sent.
    Raises OSError if the other side is gone, ValueError if nothing arrived."""
    connection.settimeout(SILENT_SECONDS)
    sending = threading.Thread(target=_send, args=(connection, seconds, most_bytes), daemon=True)
    sending.start()
    buffer, received, begun = bytearray(len(_CHUNK)), 0, time.monotonic()
    ended = begun
    while received < most_bytes and ended < begun + seconds + LATE_SECONDS:
        count = connection.recv_into(buffer, min(len(buffer), most_bytes - received))
        if not count:
            break
        received, ended = received + count, time.monotonic()
    sending.join()
    if not received:
        raise ValueError("no data arrived")
    return received / max(ended - begun, 1e-9)


def round_trip(connection: socket.socket) -> float:
    """Median seconds that a byte takes to the other side, which calls `echo`, and back. Raises OSError."""
    connection.settimeout(LATE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return statistics.median(_timed_round(connection) for _ in range(ROUNDS))


def _timed_round(connection: socket.socket) -> float:
    begun = time.monotonic()
    connection.sendall(b"?")
    if not connection.recv(1):
        raise ConnectionResetError("the other side closed the connection")
    return time.monotonic() - begun


def echo(connection: socket.socket) -> None:
    """Return the bytes of the other side's `round_trip`. Raises OSError."""
    connection.settimeout(LATE_SECONDS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(ROUNDS):
        connection.sendall(connection.recv(1))


def _send(connection: socket.socket, seconds: float, most_bytes: int) -> None:
    sent, end = 0, time.monotonic() + seconds
    try:
        while sent < most_bytes and time.monotonic() < end:
            sent += connection.send(_CHUNK[: most_bytes - sent])
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        connection.close()  # then receiving ends too
