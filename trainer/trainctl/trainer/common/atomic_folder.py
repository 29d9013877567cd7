"""Folders that appear under their name only when whole, and what writers that died left of theirs.

A writer fills `.NAME.PID.part` beside the folder and renames it. So a leftover names its process, and is removed
once that is dead; a file system is never shared by nodes here, since every node has a folder of its own.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainctl.protocol.record.leftovers import is_left_by_dead
from trainctl.trainer.common.durable_files import flush

_UNSUPPORTED = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)
"""What fsync of a folder gives where a file system has none."""
_PART = re.compile(r"^\..+\.(\d+)\.part$")


def make_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """`folder` as `write` fills it, if it isn't there yet; another process that is first with it wins. Raises OSError
    and whatever `write` raises; then nothing has changed."""
    remove_parts(folder.parent)
    if folder.is_dir():
        return
    with part_of(folder) as work:
        write(work)
        sync_all(work)
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync(folder.parent)


@contextmanager
def part_of(folder: Path) -> Iterator[Path]:
    """An empty folder to fill before it is renamed to `folder`; gone afterwards if it wasn't."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(work, ignore_errors=True)  # of a predecessor with our process id
    make_durable(work.parent)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def remove_parts(parent: Path) -> None:
    """Remove what writers that died left in `parent`, if there is such a folder."""
    for path in [*parent.iterdir()] if parent.is_dir() else []:
        match = _PART.match(path.name)
        if match and is_left_by_dead(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)


def make_durable(folder: Path) -> None:
    """Make a folder and those it is in, as far as they aren't there, and have the disk keep their names. Raises
    OSError."""
    if folder.is_dir():
        return
    make_durable(folder.parent)
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
        flush(descriptor)
    except OSError as error:
        if not path.is_dir() or error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
