"""How fast a folder's disk writes and reads, measured with a temporary file."""

import fcntl
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

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


def measure(folder: Path) -> DiskSpeed:
    """Of the disk of a folder, in at most about twice PROBE_SECONDS. The file has no name, so none is left behind.
    Raises OSError."""
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
