"""The bits of a checkpoint and their files: written whole or not at all, loaded to resume, and removed once newer ones
have been read back. `LoopState` and backend.py's `State` are all that is saved.

A checkpoint folder is itself a Hugging Face directory (config.json, model.safetensors in float32, tokenizer files), or
with an adapter a directory of peft's (adapter_config.json, adapter_model.safetensors), so any tool can load it. Beside
that: optimizer.safetensors (`SLOT.NAME`, float32; of AdamW `first.NAME` and `second.NAME`; compressed it is
optimizer.safetensors.zst), random.safetensors (generators' states), state.json (the rest of the loop's state) and
manifest.json, written last.
"""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import sync
from trainctl.protocol.machine.file_digests import files_digests, model_digests
from trainctl.protocol.messages import Compute
from trainctl.protocol.record.checkpoints import (
    MANIFEST_NAME,
    SET_ASIDE,
    STATE_NAME,
    CheckpointMetadata,
    FileEntry,
    Manifest,
    digest_of,
    first_of_each,
    is_left_by_dead,
    listed,
    outdated,
    read_manifest,
    step_in_copy,
    verify,
)
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.backends.backend import State
from trainctl.trainer.checkpoints.chunked_tensors import ZSTD_SUFFIX, Meter, read_back, read_tensors, write_tensors
from trainctl.trainer.common.atomic_folder import part_of, remove_parts
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.model import rope_config

WEIGHTS, ADAPTER = "model.safetensors", "adapter_model.safetensors"
OPTIMIZER, RANDOM = "optimizer.safetensors", "random.safetensors"
Compression = Literal["none", "zstd"]
"""Storage of the optimizer's state, two thirds of a checkpoint; the weights stay as any tool can load them."""
CARRIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files of a model's tokenizer, chat template and generation, which a checkpoint has too."""
_STORED_AS = {"exp_avg": "first", "exp_avg_sq": "second"}
"""Slots that have another name in a checkpoint."""
_NUMBER = re.compile(r"step-(\d+)")


class LoopState(msgspec.Struct, frozen=True, kw_only=True):
    """The content of state.json: all of the loop's state that isn't an array."""

    step: int  # last committed
    cursor: int  # first position after it
    updates: int  # AdamW's count
    loss_scale: float
    loss_scale_good_steps: int
    seed: int
    samples: int  # N of one epoch
    layout_digest: str
    data_digest: str
    chunks: tuple[str, ...] = ()  # of a growing file: the chunks below the cursor, of which `samples` are
    base_digest: str = ""  # with an adapter: of the frozen model and the adapter's scale


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as loaded."""

    loop: LoopState
    state: State


@dataclass(frozen=True)
class About:
    """The facts of the run that a checkpoint has beside its state, and how it is to be written."""

    compute: Compute | None = None
    adapter: dict[str, Any] | None = None  # peft's adapter_config.json; None: all weights were trained
    metadata: CheckpointMetadata | None = None
    compression: Compression = "none"
    meter: Meter = field(default=lambda _: None)  # receives the bytes written, then those read back
    before_name: Callable[[], None] = field(default=lambda: None)  # what must be on its disk before the checkpoint is


def write(folder: Path, run: str, loop: LoopState, state: State, model: Path, about: About = About()) -> Manifest:
    """Write `folder` (`checkpoints/step-N`) under a temporary name, make it durable, read it back, then give it its
    name. One that is already there stays if it holds the same, and is replaced otherwise (a step that was done again,
    or a torn one). Raises OSError if the disk doesn't take it, and InvalidInputError without the library that
    compresses; then nothing has changed."""
    tidy(folder.parent)
    with part_of(folder) as work:
        hashed = _write_files(work, loop, state, model, about)
        manifest = _seal(work, run, loop.step, about, hashed)
        for name, entry in manifest.files.items():
            read_back(work / name, entry, about.meter)
        about.before_name()
        with suppress(InvalidInputError):
            there = read_manifest(folder)
            if (there.run, there.step, there.files) == (manifest.run, manifest.step, manifest.files):
                there = verify(folder)
                sync(folder.parent)  # the process that gave it its name may have died before this
                return there
        _publish(work, folder)
    return manifest


def read(folder: Path) -> Checkpoint:
    """Return a checkpoint whose files are all as they were written. Raises InvalidInputError naming what isn't."""
    verify(folder)
    loop = read_loop(folder)
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    packed = folder / (OPTIMIZER + ZSTD_SUFFIX)
    slot_of = {stored_as: slot for slot, stored_as in _STORED_AS.items()}
    slots: dict[str, dict[str, NDArray[Any]]] = {}
    try:
        optimizer = read_tensors(packed) if packed.exists() else load_file(folder / OPTIMIZER)
        for key, array in optimizer.items():
            slot, _, name = key.partition(".")
            slots.setdefault(slot_of.get(slot, slot), {})[name] = array
        weights = load_file(folder / (ADAPTER if (folder / ADAPTER).exists() else WEIGHTS))
        return Checkpoint(loop, State(weights, slots, loop.updates, load_file(folder / RANDOM)))
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise InvalidInputError(str(folder), f"not a readable checkpoint: {first_line(error)}") from None


def read_loop(folder: Path) -> LoopState:
    """Return a checkpoint's state.json. Raises InvalidInputError."""
    try:
        return msgspec.json.decode((folder / STATE_NAME).read_bytes(), type=LoopState)
    except (OSError, msgspec.MsgspecError) as error:
        raise InvalidInputError(str(folder), f"not a readable checkpoint: {first_line(error)}") from None


def base_digest(model_digest: str, lora: Lora | None) -> str:
    """Return the digest of what a checkpoint of an adapter builds on; "" if it holds the whole model."""
    return hashlib.sha256(f"{model_digest} {lora.scale!r}".encode()).hexdigest() if lora else ""


def is_base(model: Path, lora: Lora | None, digest: str) -> bool:
    """Return whether an adapter's checkpoint with this `base_digest` builds on the model in a folder. Raises
    InvalidInputError and OSError."""
    if base_digest(model_digests(model).whole, lora) == digest:
        return True
    # Until 0.2.0 the digest was that of every weight file in the folder, also those that the index doesn't name.
    files = sorted(model.glob("*.safetensors"))
    if files == weight_files(model):
        return False
    return base_digest(files_digests([model / "config.json", *files], model).whole, lora) == digest


def check_fits(loop: LoopState, own: LoopState, where: str, model: Path, lora: Lora | None) -> None:
    """Check that a checkpoint continues the run of `own`, which trains the model in the folder `model`. Without the
    same model layout, data and seed its cursor means nothing. Raises InvalidInputError naming `where` and the first
    difference."""
    names = {
        "layout_digest": "model layout",
        "data_digest": "data",
        "samples": "number of samples",
        "seed": "seed",
        "base_digest": "base model or adapter scale",
    }
    for key, name in names.items():
        theirs, ours = getattr(loop, key), getattr(own, key)
        if theirs != ours and not (key == "base_digest" and theirs and is_base(model, lora, theirs)):
            problem = f"the {name} differs: the checkpoint has {str(theirs)[:16]}, this run has {str(ours)[:16]}"
            raise InvalidInputError(where, problem)


def tidy(checkpoints: Path) -> None:
    """Put back what a writer that died had set aside without a successor, and remove its other leftovers."""
    remove_parts(checkpoints)
    for path in [*checkpoints.glob(".step-*")]:
        aside = SET_ASIDE.match(path.name)
        if aside and is_left_by_dead(int(aside[3])):
            if not (checkpoints / aside[1]).exists():
                path.rename(checkpoints / aside[1])
                continue
            sync(checkpoints)  # the writer may have died before its successor's name was on the disk
            shutil.rmtree(path, ignore_errors=True)
        elif path.suffix == ".gone":
            shutil.rmtree(path, ignore_errors=True)


def _write_files(work: Path, loop: LoopState, state: State, model: Path, about: About) -> dict[str, FileEntry]:
    """Write all but the manifest; return the entries of the files that were hashed as they were written."""
    slots = {
        f"{_STORED_AS.get(slot, slot)}.{name}": array
        for slot, arrays in state.slots.items()
        for name, array in arrays.items()
    }
    zstd = about.compression == "zstd"
    weights, optimizer = WEIGHTS if about.adapter is None else ADAPTER, OPTIMIZER + (ZSTD_SUFFIX if zstd else "")
    random = state.random or {"none": np.zeros(1, np.uint8)}
    hashed = {
        weights: write_tensors(work / weights, state.weights | state.constants, about.meter),
        optimizer: write_tensors(work / optimizer, slots, about.meter, zstd=zstd),
        RANDOM: write_tensors(work / RANDOM, random, about.meter),
    }
    if about.adapter is None:
        config = rope_config.read(model) | {"dtype": "float32"}
        config.pop("torch_dtype", None)
        (work / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    else:
        (work / "adapter_config.json").write_text(json.dumps(about.adapter, indent=2), encoding="utf-8")
    (work / STATE_NAME).write_bytes(msgspec.json.encode(loop))
    for name in CARRIED_FILES:
        if (model / name).is_file():
            shutil.copyfile(model / name, work / name)
    return hashed


def _seal(work: Path, run: str, step: int, about: About, hashed: dict[str, FileEntry]) -> Manifest:
    """Make every file durable and hash those that aren't yet, then write the manifest."""
    files: dict[str, FileEntry] = {}
    for path in sorted(work.iterdir()):
        files[path.name] = hashed.get(path.name) or FileEntry(path.stat().st_size, digest_of(path))
        sync(path)
    manifest = Manifest(
        run=run, step=step, written_at=time.time(), files=files, compute=about.compute, metadata=about.metadata
    )
    (work / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))
    sync(work / MANIFEST_NAME)
    sync(work)
    return manifest


def _publish(work: Path, folder: Path) -> None:
    """Give `work` its name. What has the name steps aside, still listed as its step, until `work` is durably in its
    place, and comes back if that fails."""
    aside = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    is_published = False
    try:
        if folder.exists():
            folder.rename(aside)
        work.rename(folder)
        sync(folder.parent)
        is_published = True
    finally:
        if not is_published:
            if not work.exists():
                folder.rename(work)
            if aside.exists():
                aside.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


# ------------------------------------------------------------ those that stay


def spare(steps: Sequence[int], keep_last: int, keep_every: int, kept: Collection[int]) -> list[int]:
    """Return the steps that go: all but the `keep_last` highest, the first at or after each multiple of
    `keep_every` (0: none), and `kept`."""
    stay = {*sorted(steps, reverse=True)[:keep_last], *first_of_each(steps, keep_every), *kept}
    return [step for step in steps if step not in stay]


def prune(checkpoints: Path, keep_last: int, kept: Collection[Path], keep_every: int = 0) -> None:
    """Remove what `spare` names, and what is superseded of steps up to the newest one; each loses its name before its
    files. One that is being copied elsewhere stays until the next time. Raises OSError about the first that couldn't be
    removed, once all others are gone."""
    tidy(checkpoints)
    copied = step_in_copy(checkpoints)
    by_step = {step_of(folder): folder for folder in listed(checkpoints)}
    stay = [step_of(path) for path in kept] + ([copied] if copied is not None else [])
    spared = [by_step[step] for step in spare([*by_step], keep_last, keep_every, stay)]
    problems = list[OSError]()
    for folder in [*spared, *(path for path in outdated(checkpoints) if path not in kept)]:
        try:
            gone = folder.with_name(f".{folder.name}.gone")
            shutil.rmtree(gone, ignore_errors=True)
            folder.rename(gone)
            shutil.rmtree(gone)
        except OSError as error:
            problems.append(error)
    if problems:
        raise problems[0]


def kept_steps(checkpoints: Path) -> tuple[int, ...]:
    """Return the steps of the folders that have a manifest, ascending."""
    steps = []
    for folder in listed(checkpoints):
        with suppress(InvalidInputError):
            steps.append(read_manifest(folder).step)
    return tuple(sorted(steps))


def step_of(folder: Path) -> int:
    """Return the step in a folder's name: of `step-7`, or of one that was set aside under that name, 7."""
    match = _NUMBER.search(folder.name)
    assert match is not None, folder
    return int(match[1])
