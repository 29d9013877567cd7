"""Copies of checkpoints elsewhere: marks of those that are due or under way, and what a node needs for them."""

import contextlib
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Final

from trainctl.protocol.config.run_file import COPY_COMMAND, STORES, is_rsync_target
from trainctl.protocol.errors import InvalidInputError, check_installed
from trainctl.protocol.files.durable_files import make_folder, write_file
from trainctl.protocol.record.checkpoints import is_left_by_dead

COPYING: Final = ".copying"
"""File in `checkpoints`: ID of the only copying process, and the step that it copies."""
PENDING: Final = ".copy-pending"
"""Files in `checkpoints`, `.copy-pending.STEP`, with the rank that writes the checkpoint of that step; gone once it, or
a newer one, is copied."""
COMMAND_VARIABLE: Final = "TRAINCTL_COPY_COMMAND"
"""Environment variable of the node with the command that copies. A run file can't set it."""
_TEXT: Final = re.compile(r"(\d+) (\d+)\s*")


def step_in_copy(checkpoints: Path) -> int | None:
    """Return the step whose checkpoint a live process copies, which must stay meanwhile; None if none does."""
    try:
        match = _TEXT.fullmatch((checkpoints / COPYING).read_text("utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return int(match[2]) if match and not is_left_by_dead(int(match[1])) else None


def note_pending(checkpoints: Path, rank: int, step: int) -> None:
    """Have the disk keep that a checkpoint is to be copied, before `rank` writes it. Raises OSError."""
    make_folder(checkpoints)
    write_file(checkpoints / f"{PENDING}.{step}", str(rank).encode())


def pending_ranks(checkpoints: Path) -> dict[int, int]:
    """Return the ranks that write, or have written, checkpoints that are to be copied, by step."""
    ranks = {}
    for mark in checkpoints.glob(f"{PENDING}.*"):
        with contextlib.suppress(OSError, ValueError):
            ranks[int(mark.suffix[1:])] = int(mark.read_bytes())
    return dict(sorted(ranks.items()))


def clear_pending(checkpoints: Path, step: int) -> None:
    """Forget the checkpoints up to a step: that one is copied."""
    for pending in pending_ranks(checkpoints):
        if pending <= step:
            (checkpoints / f"{PENDING}.{pending}").unlink(missing_ok=True)


def check_node(copy_to: str, where: str) -> None:
    """Raise InvalidInputError if this machine lacks what the copies need."""
    field, words = f"{where}: checkpoint.copy_to", own_command()
    if is_rsync_target(copy_to) and shutil.which("rsync") is None:
        raise InvalidInputError(field, "rsync is not installed on this node; install it")
    if copy_to.startswith(STORES):
        check_installed("obstore", "cloud", field, "a copy to a store")
    if copy_to == COPY_COMMAND and not words:
        problem = f"this node has no command: set it with trainctl-agent install --env {COMMAND_VARIABLE}=..."
        raise InvalidInputError(field, problem)
    if copy_to == COPY_COMMAND and shutil.which(words[0]) is None:
        problem = f"{COMMAND_VARIABLE}: {words[0]!r} is no program on this node's PATH; install it, or give its path"
        raise InvalidInputError(field, problem)


def own_command() -> list[str]:
    """Return the words of this node's command; none if there is none."""
    try:
        return shlex.split(os.environ.get(COMMAND_VARIABLE, ""))
    except ValueError:  # an open quotation mark
        return []
