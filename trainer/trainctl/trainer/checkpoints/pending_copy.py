"""The copy that is pending on a node, in a file. The rank's next trainer finds it if this one or the copy is ended."""

from pathlib import Path
from typing import Final

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder, write_file
from trainctl.protocol.record import checkpoints

PENDING: Final = ".copy-pending"
"""File in `checkpoints`; gone once the newest one is copied and the agent has been sent a message about that."""


class PendingCopy(msgspec.Struct, frozen=True):
    """Checkpoints from a step on aren't known to be copied."""

    rank: int  # rank whose trainer copies them
    step: int  # the lowest step


def read(folder: Path) -> PendingCopy | None:
    """What is pending in `checkpoints`; None if nothing is."""
    try:
        return msgspec.json.decode((folder / PENDING).read_bytes(), type=PendingCopy)
    except (OSError, msgspec.MsgspecError):
        return None


def note(folder: Path, pending: PendingCopy | None) -> None:
    """Have the disk keep what is pending, as a whole or not at all; None: nothing. Raises OSError."""
    path = folder / PENDING
    if pending is None:
        path.unlink(missing_ok=True)
        return
    make_folder(path.parent)
    write_file(path, msgspec.json.encode(pending))


def newest_step(folder: Path) -> int | None:
    """The step of the newest complete checkpoint in `checkpoints`; None without one."""
    found = checkpoints.newest_complete(folder, hashes=False)
    try:
        return checkpoints.read_manifest(found).step if found is not None else None
    except InvalidInputError:  # it was removed meanwhile
        return None
