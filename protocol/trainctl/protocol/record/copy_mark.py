"""The mark of a copy under way: the process that copies a run's checkpoint elsewhere writes it, others look for it."""

import re
from pathlib import Path
from typing import Final

from trainctl.protocol.record.leftovers import is_left_by_dead

COPYING: Final = ".copying"
"""File in `checkpoints`: ID of the only copying process, and the step that it copies."""
_TEXT: Final = re.compile(r"(\d+) (\d+)\s*")


def step_in_copy(checkpoints: Path) -> int | None:
    """The step whose checkpoint a live process copies, which must stay meanwhile; None if none does."""
    try:
        found = _TEXT.fullmatch((checkpoints / COPYING).read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return int(found[2]) if found and not is_left_by_dead(int(found[1])) else None


def is_copying(runs: Path) -> bool:
    """Whether a live process copies a checkpoint of one of the runs in this directory."""
    return any(step_in_copy(mark.parent) is not None for mark in runs.glob(f"*/checkpoints/{COPYING}"))
