"""Digests by which ranks and runs know that they hold the same model, layout and data."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

_CHUNK_BYTES = 1 << 20


def layout_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """SHA-256 over `name shape offset` of every parameter, sorted by name; offsets count float32 elements."""
    digest = hashlib.sha256()
    offset = 0
    for name in sorted(shapes):
        digest.update(f"{name} {list(shapes[name])} {offset}\n".encode())
        offset += int(np.prod(shapes[name], dtype=np.int64))
    return digest.hexdigest()


def files_digest(files: Iterable[Path]) -> str:
    """SHA-256 over the name, size and content of each file, in the order given."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def model_digest(model: Path) -> str:
    """Of a Hugging Face directory's configuration and weights."""
    return files_digest([model / "config.json", *sorted(model.glob("*.safetensors"))])
