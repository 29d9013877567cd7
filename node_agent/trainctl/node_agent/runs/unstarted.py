"""Marks of runs whose directories are being made, by which the next agent removes what one that died has left of them.

A mark lies beside the directory and is made before it. It goes once the agent's database knows the run.
"""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from trainctl.protocol.files.durable_files import make_folder

_PREFIX = ".starting-"


def mark(directory: Path) -> None:
    """Call it before the run's directory is made. A disk that refuses it will refuse the directory too."""
    with contextlib.suppress(OSError):
        make_folder(directory.parent)
        _mark_of(directory).touch()


def unmark(directory: Path) -> None:
    """The run is known, or nothing is left of it."""
    with contextlib.suppress(OSError):
        _mark_of(directory).unlink()


def remove_left(runs: Path, is_known: Callable[[str], bool]) -> None:
    """Remove marked runs in the folder `runs` that aren't known, and all marks. No run may be opened meanwhile."""
    for found in [*runs.glob(f"{_PREFIX}*")]:
        directory = runs / found.name.removeprefix(_PREFIX)
        if not is_known(directory.name):
            shutil.rmtree(directory, ignore_errors=True)
        unmark(directory)


def _mark_of(directory: Path) -> Path:
    return directory.with_name(f"{_PREFIX}{directory.name}")
