"""Files on their disk: bytes that are to survive a power cut, and reads of the disk instead of the system's memory."""

import contextlib
import fcntl
import os


def flush(descriptor: int) -> None:
    """Have the disk keep a file's or folder's content. macOS's fsync leaves it in the disk's own cache, and only
    F_FULLFSYNC empties that; where a file system refuses it, fsync has to do. Raises OSError."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with contextlib.suppress(OSError):
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def read_from_disk(descriptor: int) -> None:
    """Have later reads of a flushed file come from its disk, as far as the system allows."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    elif (uncached := getattr(fcntl, "F_NOCACHE", None)) is not None:  # macOS
        with contextlib.suppress(OSError):  # a network's file system
            fcntl.fcntl(descriptor, uncached, 1)
