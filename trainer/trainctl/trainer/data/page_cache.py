"""The system's page cache: what of a file is in memory, and dropping it to measure reads from the disk."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

_PROBES = 16
"""Places of a file at which `is_dropped` looks."""


def drop(files: Iterable[Path]) -> bool:
    """Drop files' pages from memory, written to the disk first. Whether they are gone; False where the system can't
    tell. Pages that a process has mapped stay."""
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "RWF_NOWAIT"):
        return False
    gone = [_dropped(path) for path in files]
    return all(gone)


def _dropped(path: Path) -> bool:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        was_dropped = not _is_cached(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # a look begins to read what it doesn't find
        return was_dropped
    finally:
        os.close(file)


def _is_cached(file: int) -> bool:
    """Whether any of a few places spread over the file is in memory; a read that may not wait says so."""
    size = os.fstat(file).st_size
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # a look begins to read no more than its own page
    return any(_reads_at_once(file, size * probe // _PROBES) for probe in range(_PROBES if size else 0))


def _reads_at_once(file: int, place: int) -> bool:
    try:
        return os.preadv(file, [bytearray(1)], place, os.RWF_NOWAIT) > 0
    except OSError as error:
        return error.errno != errno.EAGAIN
