"""Checkpoint folders: the manifest that makes one complete, and which of a run's is the newest.

A checkpoint is `checkpoints/step-N/`. It appears under that name only when whole, and its manifest.json names every
other file with its size and SHA-256, so one that was torn later (a full disk, a copy broken off) is told from a
complete one."""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import sync
from trainctl.protocol.messages import Compute
from trainctl.protocol.record.checkpoint_metadata import CheckpointMetadata
from trainctl.protocol.security import received_names

MANIFEST_NAME: Final = "manifest.json"
STATE_NAME: Final = "state.json"
MANIFEST_FORMAT: Final = 1
_STEP_FOLDER = re.compile(r"^step-(?P<step>\d+)$")
SET_ASIDE: Final = re.compile(r"^\.(step-(?P<step>\d+))\.(\d+)\.old$")
"""Name of `step-N` while process PID replaces it: `.step-N.PID.old`."""
_SUPERSEDED = re.compile(r"^superseded-step-(\d+)$")
"""Name of `step-N` once the run has gone back behind step N."""


class FileEntry(msgspec.Struct, frozen=True):
    """One file of a checkpoint."""

    size_bytes: int
    sha256: str


class _Position(msgspec.Struct):
    """The part of state.json that isn't only the trainer's."""

    cursor: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What manifest.json holds."""

    format: int = MANIFEST_FORMAT
    run: str
    step: int
    written_at: float  # Unix seconds
    files: dict[str, FileEntry]
    compute: Compute | None = None  # of the rank that wrote it; None: unknown
    metadata: CheckpointMetadata | None = None  # None: unknown

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises InvalidInputError if there is none or it is of another format."""
    path = folder / MANIFEST_NAME
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise InvalidInputError(str(folder), f"incomplete checkpoint: {MANIFEST_NAME} is missing") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidInputError(str(path), f"cannot read the manifest: {error}") from None
    if manifest.format != MANIFEST_FORMAT:
        raise InvalidInputError(str(path), f"has format {manifest.format}; this program reads format {MANIFEST_FORMAT}")
    try:
        received_names.check(*manifest.files)  # it may be a copy from another machine
    except InvalidInputError as error:
        raise InvalidInputError(str(path), error.problem) from None
    return manifest


def read_cursor(folder: Path) -> int:
    """The first position after a checkpoint's step. Raises InvalidInputError."""
    try:
        return msgspec.json.decode((folder / STATE_NAME).read_bytes(), type=_Position).cursor
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInputError(str(folder / STATE_NAME), f"cannot be read: {error}") from None


def verify(folder: Path, *, hashes: bool = True) -> Manifest:
    """The manifest of a checkpoint whose every file is there and as it was written (`hashes=False`: of the right size).
    Raises InvalidInputError naming the file that is missing, cut or altered."""
    manifest = read_manifest(folder)
    named = _STEP_FOLDER.match(folder.name) or SET_ASIDE.match(folder.name)
    if named is not None and manifest.step != int(named["step"]):
        raise InvalidInputError(str(folder), f"not this checkpoint: its {MANIFEST_NAME} is of step {manifest.step}")
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise InvalidInputError(str(folder), f"incomplete checkpoint: {name} is missing")
        size = path.stat().st_size
        if size != entry.size_bytes:
            has = f"{size:,} of {entry.size_bytes:,} bytes"
            raise InvalidInputError(str(folder), f"incomplete checkpoint: {name} has {has}")
        if hashes and digest_of(path) != entry.sha256:
            raise InvalidInputError(str(folder), f"corrupt checkpoint: {name} does not match its SHA-256")
    return manifest


def listed(checkpoints: Path) -> list[Path]:
    """The folders named `step-N`, newest step first, complete or not. One that was set aside by a writer that died
    before it had put another in its place stands for its step."""
    found = _by_step(checkpoints)
    return [found[step] for step in sorted(found, reverse=True)]


def oldest_step(checkpoints: Path) -> int:
    """The lowest step of which there is a folder, complete or not; 0 if there is none."""
    return min(_by_step(checkpoints), default=0)


def _by_step(checkpoints: Path) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for path in checkpoints.iterdir() if checkpoints.is_dir() else ():
        if match := _STEP_FOLDER.match(path.name):
            found[int(match[1])] = path
        elif match := SET_ASIDE.match(path.name):
            found.setdefault(int(match[2]), path)
    return found


def newest_complete(checkpoints: Path, *, hashes: bool = True, at_most: int | None = None) -> Path | None:
    """The folder of the highest step, none above `at_most`, that verifies; None if none does."""
    found = _by_step(checkpoints)
    for folder in (found[step] for step in sorted(found, reverse=True) if at_most is None or step <= at_most):
        try:
            verify(folder, hashes=hashes)
        except InvalidInputError:
            continue
        return folder
    return None


def supersede(checkpoints: Path, after_step: int) -> None:
    """Have no checkpoint of a later step count, for those steps don't stand: each folder is kept under another name,
    which is on the disk then. A disk that refuses leaves them as they are."""
    later = {step: folder for step, folder in _by_step(checkpoints).items() if step > after_step}
    for step, folder in later.items():
        with contextlib.suppress(OSError):
            aside = checkpoints / f"superseded-step-{step}"
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
    if later:
        with contextlib.suppress(OSError):
            sync(checkpoints)


def outdated(checkpoints: Path) -> list[Path]:
    """Superseded folders of steps that the run has passed again: a checkpoint of that step or a later one is there."""
    newest = max(_by_step(checkpoints), default=0)
    found = [(path, _SUPERSEDED.match(path.name)) for path in checkpoints.iterdir()]
    return [path for path, match in found if match and int(match[1]) <= newest]


def first_of_each(steps: Iterable[int], every: int) -> set[int]:
    """Of the steps, the first at or after each multiple of `every` (0: none). A checkpoint that is due while another is
    being written is of a later step. These stay the first ones when others are removed, and when later ones come."""
    if not every:
        return set()
    first: dict[int, int] = {}  # by number of the last multiple up to the step
    for step in sorted(steps):
        first.setdefault(step // every, step)
    return {step for multiple, step in first.items() if multiple}


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
