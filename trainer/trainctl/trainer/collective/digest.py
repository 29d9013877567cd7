"""The digest by which ranks and checkpoints know that they lay parameters out alike."""

import hashlib
from collections.abc import Mapping

import numpy as np


def layout_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """SHA-256 over `name shape offset` of every parameter, sorted by name; offsets count float32 elements."""
    digest = hashlib.sha256()
    offset = 0
    for name in sorted(shapes):
        digest.update(f"{name} {list(shapes[name])} {offset}\n".encode())
        offset += int(np.prod(shapes[name], dtype=np.int64))
    return digest.hexdigest()
