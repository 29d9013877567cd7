"""The one atomic write, and files and folders that the disk keeps through a power cut.

A file has its content on the disk before it has its name, and its name is there before the call returns: after a power
cut it is the old one or the new one, whole.
"""

import contextlib
import errno
import fcntl
import glob
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""Errors of fsync of a folder on a file system that has none."""
_NO_FULL_SYNC = (errno.ENOTSUP, errno.EINVAL, errno.ENOTTY)
"""Errors of F_FULLFSYNC on a file system that has none; others are the disk's."""
_OF_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of writing to an open file, in which the system names none."""
LEFT_SECONDS = 3600.0
"""A file without its name that was not written to for so long was left by a writer that died."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Have an OSError of writing name this file or folder, if it names none."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno in _OF_WRITES:
            error.filename = str(path)
        raise


def write_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replace a file by this content, as `replaced` does. Raises OSError."""
    with replaced(path, mode) as file:
        file.write(content)


@contextlib.contextmanager
def replaced(path: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """A file to write that takes the name `path` when the block ends: its content and its name are on the disk then. If
    the block or the disk fails, `path` is as it was. `mode`: the permissions; None: as the umask leaves them. Raises
    OSError."""
    with naming(path):
        yield from _replaced(path, mode)


def _replaced(path: Path, mode: int | None) -> Iterator[IO[bytes]]:
    _remove_left(path)
    part = path.with_name(f".{path.name}.{os.urandom(4).hex()}.part")
    try:
        # Private from the beginning if it is to be.
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode & 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(file.fileno(), mode)
        rename(part, path)
    finally:
        part.unlink(missing_ok=True)


def _remove_left(path: Path) -> None:
    for part in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 8}.part"):
        with contextlib.suppress(FileNotFoundError):  # another writer was first
            if part.stat().st_mtime < time.time() - LEFT_SECONDS:
                part.unlink()


def rename(part: Path, path: Path) -> None:
    """Give a complete file its name, or that of one in its place, once its content is on the disk. Raises OSError."""
    sync(part)
    part.replace(path)
    sync(path.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those it is in, as far as they aren't there, and have the disk keep their names. Raises
    OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync_all(folder: Path) -> None:
    """Have the disk keep a folder and all that is in it. Raises OSError."""
    for path in folder.rglob("*"):
        if not path.is_symlink():  # what it leads to isn't ours
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Have the disk keep a file or a folder, whose names some file systems keep by themselves. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            flush(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def flush(descriptor: int) -> None:
    """Have the disk keep a file's or folder's content. macOS's fsync leaves it in the disk's own cache, and only
    F_FULLFSYNC empties that; where a file system refuses it, fsync has to do. Raises OSError."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        try:
            fcntl.fcntl(descriptor, full)
            return
        except OSError as error:
            if error.errno not in _NO_FULL_SYNC:
                raise
    os.fsync(descriptor)


def read_from_disk(descriptor: int) -> None:
    """Have later reads of a flushed file come from its disk, as far as the system allows."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    elif (uncached := getattr(fcntl, "F_NOCACHE", None)) is not None:  # macOS
        with contextlib.suppress(OSError):  # a network's file system
            fcntl.fcntl(descriptor, uncached, 1)
