"""What `trainctl cluster sync` copies: the files of a run here, where a node keeps them, and which ones it lacks."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config.data_files import data_files, glob_root, is_glob, lacks_files
from trainctl.protocol.config.hub_models import is_hub_id, model_folder
from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.config.run_tables import SUFFIXES, DataKind, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.file_digests import file_digest
from trainctl.tui.doctor.findings import Asset

MODEL_SUFFIXES = frozenset({".jinja", ".json", ".model", ".safetensors", ".tiktoken", ".txt"})
"""Of a model's configuration, weights, tokenizer and template. Other files of its folder aren't copied."""
MARGIN_BYTES, MARGIN_FRACTION = 100_000_000, 0.05
"""Kept free on a disk: the larger of the two, the fraction being of what is copied there."""
_REVISION = re.compile(r"[0-9a-zA-Z._-]+")


class SourceFiles(NamedTuple):
    """The files of a run's model or data on this machine."""

    what: Asset
    path: str  # as the run file has it for this machine
    root: Path  # the folder from which files are named
    digests: dict[str, str]  # SHA-256 by name
    sizes: dict[str, int]  # bytes by name


class Target(NamedTuple):
    """Where a node keeps them. Of a model in the node's Hugging Face cache only the node knows the folder."""

    what: Asset
    path: str  # absolute on that node, or a Hugging Face id
    root: str  # the folder from which files are named; empty for a Hugging Face id
    kind: DataKind
    revision: str = ""  # of a Hugging Face id

    def request(self, source: SourceFiles) -> dict[str, Any]:
        """What the node is asked about."""
        return {**self._asdict(), "digests": source.digests, "sizes": source.sizes}


class NodeFiles(NamedTuple):
    """What a node has of them."""

    root: str
    lacking: tuple[str, ...]  # names of files that it lacks, or has with other contents
    extra: tuple[str, ...]  # names of files there that the run would read too
    current: bool  # whether the run finds this folder by the path in the run file
    free_bytes: int
    disk: int  # alike for folders on one disk
    rsync: str  # path of the program; empty: none that is new enough


def sources(config: RunFile) -> tuple[SourceFiles, ...]:
    """The files here by a run file as it is for this machine, every one of them read. Raises OSError, and
    InvalidInputError for data without files."""
    model = model_folder(config.model.path)
    weights = set(weight_files(model))
    kept = sorted(
        file for file in model.iterdir() if _is_model_file(file) and (file.suffix != ".safetensors" or file in weights)
    )
    found = [_source("model", config.model.path, model, kept)]
    paths: tuple[tuple[Asset, str], ...] = (("data", config.data.path), ("held-out data", config.data.held_out_path))
    for what, text in paths:
        if text:
            path = Path(text)
            files = data_files(path, config.data.kind)
            if not files:
                raise InvalidInputError(text, lacks_files(path, config.data.kind))
            found.append(_source(what, text, data_root(path), files))
    return tuple(found)


def data_root(path: Path) -> Path:
    """The folder from which the files of data at this path are named, on the machine that has them."""
    return path if path.is_dir() else glob_root(path) if is_glob(path) else path.parent


def _is_model_file(file: Path) -> bool:
    return file.suffix in MODEL_SUFFIXES and not file.name.startswith(".") and file.is_file()


def _source(what: Asset, path: str, root: Path, files: Sequence[Path]) -> SourceFiles:
    names = {file.relative_to(root).as_posix(): file for file in files}
    return SourceFiles(
        what, path, root, {name: file_digest(file) for name, file in names.items()},
        {name: file.stat().st_size for name, file in names.items()},
    )  # fmt: skip


def target(source: SourceFiles, config: RunFile, node: str) -> Target:
    """Where a node keeps what is here, by the run file as it is for that node. Raises InvalidInputError naming the
    field where it can't be the same there."""
    kind = config.data.kind
    if source.what == "model":
        path = config.model.path
        return _hub_target(source, path, kind, node) if is_hub_id(path) else Target("model", path, path, kind)
    path = config.data.path if source.what == "data" else config.data.held_out_path
    return Target(source.what, path, _data_target(source, path, kind, node), kind)


def _hub_target(source: SourceFiles, path: str, kind: DataKind, node: str) -> Target:
    if source.root.parent.name != "snapshots" or not _REVISION.fullmatch(source.root.name):
        raise InvalidInputError(
            "model.path", f"{path} is {source.root} here, which isn't in the Hugging Face cache; set nodes.{node}"
            f".model_path, or on that machine, run: hf download {path}",
        )  # fmt: skip
    return Target("model", path, "", kind, source.root.name)


def _data_target(source: SourceFiles, path: str, kind: DataKind, node: str) -> str:
    """The folder there: of a file the one above it, of a glob the one above its first wildcard."""
    here, there = Path(source.path), Path(path)
    if is_glob(here) or (here.is_dir() and "*" in there.name and there.name != here.name):
        return str(glob_root(there))
    if here.is_dir() or (there.name != here.name and there.suffix not in {*SUFFIXES[kind], here.suffix}):
        return path
    if there.name != here.name:
        field = "data_path" if source.what == "data" else "held_out_path"
        raise InvalidInputError(
            f"nodes.{node}.{field}", f"the file must be named {here.name}, as here: nodes compare names too"
        )
    return str(there.parent)


def without_room(needs: Iterable[tuple[NodeFiles, int]]) -> dict[int, str]:
    """Why copying would fill a disk, by disk. `needs`: for each folder the bytes to copy; folders may share a disk."""
    free: dict[int, int] = {}
    wanted: dict[int, int] = {}
    for answer, count in needs:
        free[answer.disk] = min(answer.free_bytes, free.get(answer.disk, answer.free_bytes))
        wanted[answer.disk] = wanted.get(answer.disk, 0) + count
    return {
        disk: f"{gigabytes(count)} to copy, but only {gigabytes(free[disk])} free on that disk "
        f"({gigabytes(_margin(count))} must stay free)"
        for disk, count in wanted.items()
        if count and count + _margin(count) > free[disk]
    }


def _margin(count: int) -> int:
    return max(MARGIN_BYTES, round(count * MARGIN_FRACTION))


def gigabytes(count: int) -> str:
    """`2.47 GB`, `12.3 MB` or `0.004 MB`."""
    value, unit = (count / 1e9, "GB") if count >= 1e9 else (count / 1e6, "MB")
    return f"{value:.3g} {unit}" if value >= 0.001 or not count else f"{count} bytes"
