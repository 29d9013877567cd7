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

from trainctl.protocol.files import durable_files
from trainctl.protocol.files.durable_files import naming, sync, sync_all
from trainctl.protocol.record.checkpoints import is_left_by_dead

_PART = re.compile(r"^\..+\.(\d+)\.part$")


def make_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Make `folder` as `write` fills it, if it isn't there yet; another process that is first with it wins. Raises
    OSError and whatever `write` raises; then nothing has changed."""
    remove_parts(folder.parent)
    if folder.is_dir():
        return
    with part_of(folder) as work:
        write(work)
        _follow_umask(work)
        sync_all(work)
        try:
            work.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
        sync(folder.parent)


def _follow_umask(folder: Path) -> None:
    """Let others read new files as the umask says: safetensors makes its own for their owner alone."""
    sample = folder / ".mode"
    sample.touch(0o666)
    mode = sample.stat().st_mode & 0o777
    sample.unlink()
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(path.stat().st_mode | mode)


@contextmanager
def part_of(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill before it is renamed to `folder`; gone afterwards if it wasn't."""
    work = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    shutil.rmtree(work, ignore_errors=True)  # of a predecessor with our process id
    durable_files.make_folder(work.parent)
    work.mkdir()
    try:
        with naming(folder):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def remove_parts(parent: Path) -> None:
    """Remove what writers that died left in `parent`, if there is such a folder."""
    for path in [*parent.iterdir()] if parent.is_dir() else []:
        match = _PART.match(path.name)
        if match and is_left_by_dead(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
