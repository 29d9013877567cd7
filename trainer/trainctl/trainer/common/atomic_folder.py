"""Folders that appear under their name only when whole, and what writers that died left of theirs.

A writer fills `.NAME.PID.part` beside the folder and renames it. So a leftover names its process, and is removed
once that is dead; a file system is never shared by nodes here, since every node has a folder of its own.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainctl.protocol.record.leftovers import is_left_by_dead
from trainctl.trainer.common.durable_files import flush

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
    work.mkdir(parents=True)
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


def sync_all(folder: Path) -> None:
    """Have the disk keep a folder and all that is in it. Raises OSError."""
    for path in folder.rglob("*"):
        if not path.is_symlink():  # what it leads to isn't ours
            sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Have the disk keep a file or a folder. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        flush(descriptor)
    finally:
        os.close(descriptor)
