"""Digests by which ranks and runs know that they hold the same model, layout and data."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainctl.protocol.messages import FileDigest

MAX_FILES = 64
_CHUNK_BYTES = 1 << 20


def layout_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """SHA-256 over `name shape offset` of every parameter, sorted by name; offsets count float32 elements."""
    digest = hashlib.sha256()
    offset = 0
    for name in sorted(shapes):
        digest.update(f"{name} {list(shapes[name])} {offset}\n".encode())
        offset += int(np.prod(shapes[name], dtype=np.int64))
    return digest.hexdigest()


@dataclass(frozen=True)
class Digests:
    """Of some files: of all together, and of each, so that the one that differs can be named."""

    whole: str
    files: tuple[FileDigest, ...]  # at most MAX_FILES: the last stands for the rest


def files_digests(files: Iterable[Path], root: Path) -> Digests:
    """SHA-256 over the name, size and content of each file, in the order given; in the list, files are named from
    `root`."""
    whole, each = hashlib.sha256(), []
    for path in files:
        own = hashlib.sha256()
        for part in _parts(path):
            whole.update(part)
            own.update(part)
        each.append(FileDigest(path.relative_to(root).as_posix(), own.hexdigest()))
    return Digests(whole.hexdigest(), _listed(each))


def model_digests(model: Path) -> Digests:
    """Of a Hugging Face directory's configuration and weights."""
    return files_digests([model / "config.json", *sorted(model.glob("*.safetensors"))], model)


def _parts(path: Path) -> Iterator[bytes]:
    yield f"{path.name} {path.stat().st_size}\n".encode()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _listed(each: list[FileDigest]) -> tuple[FileDigest, ...]:
    if len(each) <= MAX_FILES:
        return tuple(each)
    rest = each[MAX_FILES - 1 :]
    together = hashlib.sha256("".join(f"{file.name} {file.digest}\n" for file in rest).encode()).hexdigest()
    return (*each[: MAX_FILES - 1], FileDigest(f"{len(rest)} more files", together))
