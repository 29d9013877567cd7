"""The files that `trainctl cluster sync` copies: a run's files on this machine, where a node keeps them, and what it
has of them.

A node runs `python -m trainctl.tui.setup.sync_files` over SSH: it takes a list of Target and gives a list of NodeFiles,
as JSON. It changes nothing but the revision that the Hugging Face cache names as its newest, and that only for files
with the right digests.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec

from trainctl.protocol.config.data_files import data_files, glob_root, is_glob, lacks_files
from trainctl.protocol.config.model_facts import INDEX_FILE, SINGLE_FILE, is_hub_id, model_folder, weight_files
from trainctl.protocol.config.run_tables import SUFFIXES, DataKind, RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError, installing
from trainctl.protocol.files.durable_files import make_folder, write_file
from trainctl.protocol.machine.file_digests import file_digest
from trainctl.tui.doctor.findings import Asset
from trainctl.tui.setup import rsync

MODEL_SUFFIXES = frozenset({".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"})
"""Suffixes of a model's configuration, weights, tokenizer and template. Other files of its folder aren't copied."""
MARGIN_BYTES, MARGIN_FRACTION = 100_000_000, 0.05
"""Kept free on a disk: the larger of the two, the fraction being of what is copied there."""
_REVISION = re.compile(r"[0-9a-zA-Z._-]+")


class Target(msgspec.Struct, frozen=True):
    """A node's place of a run's model or data. Of a model in its Hugging Face cache only the node knows the folder."""

    what: Asset
    path: str  # absolute on that node, or a Hugging Face id
    root: str  # the folder from which files are named; empty for a Hugging Face id
    kind: DataKind
    revision: str = ""  # of a Hugging Face id
    names: tuple[str, ...] = ()
    digests: dict[str, str] = {}  # by name, once they are copied


class NodeFiles(msgspec.Struct, frozen=True):
    """A node's answer about a target, or the problem that it has with it."""

    root: str = ""
    differing: tuple[str, ...] = ()  # names of files with another digest
    extra: tuple[str, ...] = ()  # names of files there that the run would read too
    current: bool = True  # whether the run finds this folder by the path in the run file
    free_bytes: int = 0
    disk: int = 0  # alike for folders on one disk
    rsync: str = ""  # path of the program; empty: none that is new enough
    problem: str = ""


@dataclass(frozen=True)
class SourceFiles:
    """The files of a run's model or data on this machine."""

    what: Asset
    path: str  # as the run file has it for this machine
    root: Path  # the folder from which files are named
    sizes: dict[str, int]  # bytes by name

    @cached_property
    def digests(self) -> dict[str, str]:
        """The SHA-256 of each file by name, as nodes compare it."""
        return {name: file_digest(self.root / name) for name in self.sizes}


def sources(config: RunFile) -> tuple[SourceFiles, ...]:
    """Return the files here by a run file as it is for this machine. Raises OSError, and InvalidInputError for data
    without files."""
    model = model_folder(config.model.path)
    weights = set(weight_files(model))
    kept = [
        file
        for file in sorted(model.iterdir())
        if file.suffix in MODEL_SUFFIXES and not file.name.startswith(".") and file.is_file()
        if file.suffix != ".safetensors" or file in weights
    ]
    assets = [_source("model", config.model.path, model, kept)]
    paths: tuple[tuple[Asset, str], ...] = (("data", config.data.path), ("held-out data", config.data.held_out_path))
    for what, text in paths:
        if text:
            path = Path(text)
            files = data_files(path, config.data.kind)
            if not files:
                raise InvalidInputError(text, lacks_files(path, config.data.kind))
            assets.append(_source(what, text, data_root(path), files))
    return tuple(assets)


def _source(what: Asset, path: str, root: Path, files: Sequence[Path]) -> SourceFiles:
    return SourceFiles(what, path, root, {file.relative_to(root).as_posix(): file.stat().st_size for file in files})


def target(source: SourceFiles, config: RunFile, node: str) -> Target:
    """Return where a node keeps what is here, by the run file as it is for that node. Raises InvalidInputError naming
    the field where it can't be the same there."""
    kind, names = config.data.kind, tuple(source.sizes)
    if source.what != "model":
        path = config.data.path if source.what == "data" else config.data.held_out_path
        return Target(source.what, path, _data_root_there(source, path, config, node), kind, names=names)
    path = config.model.path
    if not is_hub_id(path):
        return Target("model", path, path, kind, names=names)
    if source.root.parent.name != "snapshots" or not _REVISION.fullmatch(source.root.name):
        problem = f"{path} is {source.root} here, which isn't in the Hugging Face cache; set nodes.{node}.model_path, "
        raise InvalidInputError("model.path", f"{problem}or on that machine, run: hf download {path}")
    return Target("model", path, "", kind, source.root.name, names)


def _data_root_there(source: SourceFiles, path: str, config: RunFile, node: str) -> str:
    """Return the folder there: of a file the one above it, of a glob the one above its first wildcard."""
    here, there = Path(source.path), Path(path)
    if is_glob(here) or (here.is_dir() and "*" in there.name and there.name != here.name):
        return str(glob_root(there))
    if here.is_dir() or (there.name != here.name and there.suffix not in {*SUFFIXES[config.data.kind], here.suffix}):
        return path
    if there.name != here.name:
        field = "data_path" if source.what == "data" else "held_out_path"
        problem = f"the file must be named {here.name}, as here: nodes compare names too"
        raise InvalidInputError(f"nodes.{node}.{field}", problem)
    return str(there.parent)


def without_room(needs: Iterable[tuple[NodeFiles, int]]) -> dict[int, str]:
    """Return why copying would fill a disk, by disk. `needs` has the bytes to copy to each folder; folders may share a
    disk."""
    free: dict[int, int] = {}
    wanted: dict[int, int] = {}
    for answer, count in needs:
        free[answer.disk] = min(answer.free_bytes, free.get(answer.disk, answer.free_bytes))
        wanted[answer.disk] = wanted.get(answer.disk, 0) + count
    margins = {disk: max(MARGIN_BYTES, round(count * MARGIN_FRACTION)) for disk, count in wanted.items()}
    return {
        disk: f"{gigabytes(count)} to copy, but only {gigabytes(free[disk])} free on that disk "
        f"({gigabytes(margins[disk])} must stay free)"
        for disk, count in wanted.items()
        if count and count + margins[disk] > free[disk]
    }


def gigabytes(count: int) -> str:
    """`2.47 GB`, `12.3 MB` or `0.004 MB`."""
    value, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{value:.3g} {unit}" if value >= 0.001 or not count else f"{count} bytes"


# ---------------------------------------------------------------- what the node runs


def look(target: Target) -> NodeFiles:
    """Return what is here of the files of a target. If all have its digests, a model of the Hugging Face cache gets
    this revision as its newest one. Raises TrainctlError and OSError."""
    root, reference = Path(target.root), None
    if target.revision:
        cached = _cached(target.path)
        root, reference = cached / "snapshots" / target.revision, cached / "refs" / "main"
    differing = [name for name, digest in target.digests.items() if file_digest(root / name) != digest]
    is_current = reference is None
    if reference is not None:
        if target.digests and not differing:  # as huggingface_hub does after a download
            make_folder(reference.parent)
            write_file(reference, target.revision.encode("ascii"))
        with contextlib.suppress(OSError):
            is_current = reference.read_text("ascii", "replace").strip() == target.revision
    there = next(folder for folder in (root, *root.parents) if folder.is_dir())
    free, disk = shutil.disk_usage(there).free, there.stat().st_dev
    return NodeFiles(str(root), tuple(differing), _extra(root, target), is_current, free, disk, rsync.usable())


def data_root(path: Path) -> Path:
    """Return the folder from which the files of data at this path are named, on the machine that has them."""
    return path if path.is_dir() else glob_root(path) if is_glob(path) else path.parent


def _cached(model: str) -> Path:
    """Return the folder of a model in this machine's Hugging Face cache."""
    if importlib.util.find_spec("huggingface_hub") is None:
        problem = f"a Hugging Face id needs huggingface_hub on that machine; {installing('torch', 'mlx')}"
        raise InvalidInputError(model, problem)
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    return Path(HF_HUB_CACHE) / repo_folder_name(repo_id=model, repo_type="model")


def _extra(root: Path, target: Target) -> tuple[str, ...]:
    """Return the names of files here that the run would read besides those of the target."""
    path = Path(target.path)
    if target.what == "model":
        files = [root / name for name in (SINGLE_FILE, INDEX_FILE)]  # they decide which weights are read
    else:
        files = data_files(path, target.kind) if data_root(path) == root else []
    names = {file.relative_to(root).as_posix() for file in files if file.is_file()}
    return tuple(sorted(names - {*target.names}))


def _answer(target: Target) -> NodeFiles:
    try:
        return look(target)
    except OSError as error:
        return NodeFiles(problem=f"{error.filename or target.root}: {error.strerror or error}")
    except TrainctlError as error:
        return NodeFiles(problem=str(error))


if __name__ == "__main__":
    os.umask(0o022)
    targets = msgspec.convert(json.loads(sys.stdin.read()), list[Target])
    print(json.dumps(msgspec.to_builtins([_answer(target) for target in targets])))
