"""The checkpoint that separate work uses: chosen on the lead, and copied to the nodes that don't have it."""

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.checkpoints import best_checkpoint
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security import received_names

PART_BYTES = 60 * 1024
"""Size of the parts in which a file is copied."""
AT_ONCE = 4
"""Parts of a file that are requested at a time."""
_NOT_NEEDED = ("optimizer.safetensors", "optimizer.safetensors.zst", "random.safetensors")

ReadPart = Callable[[str, int], Awaitable[bytes]]
"""Reads a part of a file of the checkpoint on the lead, by name and offset."""


@dataclass(frozen=True)
class Chosen:
    """A checkpoint on this machine."""

    step: int
    folder: Path
    files: dict[str, str]  # those that a worker needs, with their SHA-256


def choose(paths: RunPaths, step: int | None, *, best: bool) -> Chosen:
    """The checkpoint of `step`, the best one, or the newest. Raises InvalidInputError if this node doesn't have it."""
    complete = {}
    for folder in checkpoints.listed(paths.checkpoints):
        try:
            manifest = checkpoints.verify(folder, hashes=False)
        except InvalidInputError:
            continue
        complete[manifest.step] = (folder, manifest)
    if not complete:
        raise InvalidInputError("run", f"no complete checkpoint in {paths.checkpoints}; use the agent that wrote it")
    if best:
        folder_of_best = best_checkpoint(paths)
        step = next((known for known, (folder, _) in complete.items() if folder == folder_of_best), None)
        if step is None:
            raise InvalidInputError("--best", "no checkpoint was evaluated; use --step N")
    step = max(complete) if step is None else step
    if step not in complete:
        known = ", ".join(map(str, sorted(complete)))
        raise InvalidInputError("--step", f"no complete checkpoint of step {step}; steps with a checkpoint: {known}")
    folder, manifest = complete[step]
    files = {name: entry.sha256 for name, entry in manifest.files.items() if name not in _NOT_NEEDED}
    return Chosen(step, folder, files)


def read_part(folder: Path, name: str, offset_bytes: int) -> bytes:
    """A part of one of the checkpoint's files."""
    with received_names.opened(folder, name) as file:
        file.seek(offset_bytes)
        return file.read(PART_BYTES)


async def copy(files: dict[str, str], folder: Path, step: int, run: str, read: ReadPart) -> None:
    """Copy files into `folder`, as a checkpoint with a manifest of these files. Files that are there already stay.
    Raises InvalidInputError for what is no name, RefusedError if a file arrives damaged, OSError, and what `read`
    raises."""
    received_names.check(*files)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    sizes = {}
    for name, digest in files.items():
        there = await asyncio.to_thread(_stored, folder, name)
        sizes[name] = there[0] if there[1] == digest else await _copy_file(folder, name, digest, read)
    entries = {name: checkpoints.FileEntry(sizes[name], digest) for name, digest in files.items()}
    manifest = checkpoints.Manifest(run=run, step=step, written_at=0.0, files=entries)
    with received_names.opened(folder, checkpoints.MANIFEST_NAME, to="write") as file:
        file.write(msgspec.json.encode(manifest))


def _stored(folder: Path, name: str) -> tuple[int, str]:
    """Size and SHA-256 of a file that is there; no digest if it isn't."""
    try:
        with received_names.opened(folder, name) as file:
            return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return 0, ""


async def _copy_file(folder: Path, name: str, digest: str, read: ReadPart) -> int:
    """Give the file's size."""
    found, offset, is_whole = hashlib.sha256(), 0, False
    with received_names.opened(folder, name, to="write") as file:
        while not is_whole:
            places = [offset + number * PART_BYTES for number in range(AT_ONCE)]
            for part in await asyncio.gather(*(read(name, place) for place in places)):
                file.write(part)
                found.update(part)
                offset += len(part)
                is_whole = is_whole or len(part) < PART_BYTES
    if found.hexdigest() != digest:
        raise RefusedError(f"{name} was damaged while it was copied")
    return offset
