"""Checkpoint folders: the manifest that makes one complete, which of a run's is the newest or the best, and the mark of
a copy under way.

A checkpoint is `checkpoints/step-N/`. It appears under that name only when whole, and its manifest.json names every
other file with its size and SHA-256, so one that was torn later (a full disk, a copy broken off) is told from a
complete one."""

import bisect
import contextlib
import hashlib
import math
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.protocol.config.run_file import COPY_COMMAND, STORES, is_rsync_target
from trainctl.protocol.errors import InvalidInputError, check_installed
from trainctl.protocol.files.durable_files import make_folder, sync, write_file
from trainctl.protocol.messages import Compute, Count, Generation
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.protocol.security import received_names


class Performance(msgspec.Struct, frozen=True, kw_only=True):
    """The run's results up to the checkpoint; None: unknown to the writer."""

    loss: float | None = None  # mean training loss of the checkpoint's step
    step_seconds: float | None = None  # duration of that step
    tokens_per_second: float | None = None  # of all ranks, in that step
    eval_loss: float | None = None  # newest held-out loss in the node's record
    eval_step: Count | None = None  # step of that evaluation


class ParentCheckpoint(msgspec.Struct, frozen=True):
    """The checkpoint of another run that a branch started from."""

    run: str
    step: Count


class Lineage(msgspec.Struct, frozen=True, kw_only=True):
    """The run and the step that the checkpoint continues."""

    run: str
    resumed_from: Count | None = None  # step of the checkpoint that the writer loaded; None: it loaded none
    generation: Generation | None = None  # generation that committed the step; None: the writer was given the state
    parent: ParentCheckpoint | None = None  # of a branch; None: the run started at step 0, or 0.2.0 wrote it


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The node and the software that wrote the checkpoint."""

    node: str
    program: str  # version of trainctl
    python: str
    library: str  # array library and its version, for example torch 2.13.0
    device: str
    system: str  # operating system and processor, for example Linux x86_64


class CheckpointMetadata(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    recipe: dict[str, Any]  # the run file with its defaults, without [nodes.NAME] env
    performance: Performance
    lineage: Lineage
    environment: Environment


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
    """The content of manifest.json."""

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
    """Return the first steps at or after each multiple of `every` (0: none). A checkpoint that is due while another is
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


def is_left_by_dead(pid: int) -> bool:
    """Return whether no one works any more on what was named after `pid`. Our own number means a predecessor that had
    it, so don't ask while at work on such a folder."""
    import psutil  # of the extra `tui`

    if pid == os.getpid():
        return True
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False


def best_step(steps: Collection[int], evaluations: Sequence[Evaluation]) -> int | None:
    """Return the step whose held-out loss is lowest; the newest of equals; None if none was evaluated."""
    ascending, losses = sorted(steps), dict[int, float]()
    for one in sorted(evaluations, key=lambda one: one.step):
        if (at := bisect.bisect_left(ascending, one.step)) < len(ascending):
            losses[ascending[at]] = one.loss
    finite = [step for step, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda step: (losses[step], -step), default=None)


def best_checkpoint(paths: RunPaths, before: int | None = None) -> Path | None:
    """The best complete one, of those before step `before`, as this node's copy of the record has it now; None without
    an evaluation or a record."""
    found = dict[int, Path]()
    for folder in listed(paths.checkpoints):
        try:
            step = read_manifest(folder).step
        except InvalidInputError:
            continue
        if before is None or step < before:
            found[step] = folder
    try:
        with RecordReader(paths) as record:
            best = best_step(found, record.evaluations())
    except InvalidInputError:
        return None
    return found[best] if best is not None else None


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
