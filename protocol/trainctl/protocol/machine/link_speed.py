"""How fast a connection carries bytes in both directions at once, as the sums of a group load it."""

import socket
import threading
import time
from typing import Final

EXCHANGE_SECONDS: Final = 3.0
"""Time for which each side sends."""
EXCHANGE_BYTES: Final = 4 << 30
"""Bytes after which a side stops sending."""
SILENT_SECONDS: Final = 10.0
"""Time without a byte after which the other side counts as gone."""
_CHUNK: Final = bytes(1 << 20)


def exchange(connection: socket.socket, seconds: float = EXCHANGE_SECONDS) -> float:
    """Send for so many seconds while the other side does the same; bytes per second received. Both sides call it.
    Raises OSError if the other side is gone, ValueError if nothing arrived."""
    connection.settimeout(SILENT_SECONDS)
    sending = threading.Thread(target=_send, args=(connection, seconds), daemon=True)
    sending.start()
    buffer, received, begun = bytearray(len(_CHUNK)), 0, time.monotonic()
    ended = begun
    while count := connection.recv_into(buffer):
        received, ended = received + count, time.monotonic()
    sending.join()
    if not received:
        raise ValueError("no data arrived")
    return received / max(ended - begun, 1e-9)


def _send(connection: socket.socket, seconds: float) -> None:
    sent, end = 0, time.monotonic() + seconds
    try:
        while sent < EXCHANGE_BYTES and time.monotonic() < end:
            sent += connection.send(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        connection.close()  # then receiving ends too
