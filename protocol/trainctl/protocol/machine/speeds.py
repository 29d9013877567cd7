"""Speeds of a folder's disk, measured with a temporary file, and of the link to another machine."""

import fcntl
import os
import socket
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROBE_BYTES = 32 << 20
"""Bytes written and then read, if the disk does so within PROBE_SECONDS."""
PROBE_SECONDS = 2.0
"""Seconds after which writing stops, and after which reading stops: a slow disk moves fewer bytes."""
_BLOCK_BYTES = 1 << 20
_SYNC_BYTES = 8 << 20
"""Bytes between two waits for the disk: otherwise memory would take everything at once."""


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes per second."""

    write: float
    read: float | None  # None: the file can't be dropped from memory here, so reading it would not measure the disk


def measure_disk(folder: Path) -> DiskSpeed:
    """Return the speed of the disk of a folder, measured in at most about twice PROBE_SECONDS. The file has no name, so
    none is left behind. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        written, spent = _write(file.fileno())
        return DiskSpeed(written / spent, _read_rate(file.fileno(), written) if _drop_cached(file.fileno()) else None)


def _write(file: int) -> tuple[int, float]:
    """Bytes written, and the seconds until they were on the disk."""
    written, spent = 0, 0.0
    while written < PROBE_BYTES and spent < PROBE_SECONDS:
        block = os.urandom(_BLOCK_BYTES)  # a compressing file system can't shrink it
        begun = time.perf_counter()
        written += os.write(file, block)
        if written % _SYNC_BYTES == 0:
            os.fsync(file)
        spent += time.perf_counter() - begun
    begun = time.perf_counter()
    os.fsync(file)
    return written, spent + time.perf_counter() - begun


def _drop_cached(file: int) -> bool:
    """Drop what memory holds of a file; whether this system can."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        return True
    if hasattr(fcntl, "F_NOCACHE"):  # macOS
        fcntl.fcntl(file, fcntl.F_NOCACHE, 1)
        return True
    return False


def _read_rate(file: int, size: int) -> float:
    done, begun = 0, time.perf_counter()
    while done < size and time.perf_counter() - begun < PROBE_SECONDS:
        done += len(os.pread(file, _BLOCK_BYTES, done))
    return done / (time.perf_counter() - begun)


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


def exchange(connection: socket.socket, seconds: float = EXCHANGE_SECONDS, max_bytes: int = EXCHANGE_BYTES) -> float:
    """Send for so many seconds, at most `max_bytes`, while the other side does the same; bytes per second received.
    Both sides call it. It receives no more than `max_bytes`, and for no more than LATE_SECONDS after it has sent.
    Raises OSError if the other side is gone, ValueError if nothing arrived."""
    connection.settimeout(SILENT_SECONDS)
    sending = threading.Thread(target=_send, args=(connection, seconds, max_bytes), daemon=True)
    sending.start()
    buffer, received, begun = bytearray(len(_CHUNK)), 0, time.monotonic()
    ended = begun
    while received < max_bytes and ended < begun + seconds + LATE_SECONDS:
        count = connection.recv_into(buffer, min(len(buffer), max_bytes - received))
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


def _send(connection: socket.socket, seconds: float, max_bytes: int) -> None:
    sent, end = 0, time.monotonic() + seconds
    try:
        while sent < max_bytes and time.monotonic() < end:
            sent += connection.send(_CHUNK[: max_bytes - sent])
        connection.shutdown(socket.SHUT_WR)
    except OSError:
        connection.close()  # then receiving ends too
