"""The memory that a trainer and its reducer share, and what is laid out in it.

First come the parameters' float32 values, flat, in ascending order of Hugging Face name; then the tail: of each rank
in turn, the few numbers that it adds to the sums of the others. A rank writes its own slot and leaves zeros in the
others', so the all-reduce of the tail moves values and rounds nothing, and every rank adds the same doubles in the same
order. A double is three float32 numbers, each the rounded rest of those before it: 72 bits hold its 53.
"""

import hashlib
import importlib
import math
import mmap
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.trainer.backends.passes import Array

Integers = NDArray[np.int32]
WORD_BYTES = 4
_PARTS = 3  # float32 numbers of a double


class SharedBuffer:
    """Zeroed memory without a name: gone with the last process that holds it."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Map what `descriptor` stands for; the descriptor is kept until `close`."""
        self.descriptor, self.size_bytes = descriptor, size_bytes
        self._memory = mmap.mmap(descriptor, size_bytes)
        self.floats: Array = np.frombuffer(self._memory, np.float32)
        self.integers: Integers = np.frombuffer(self._memory, np.int32)

    @classmethod
    def create(cls, words: int) -> "SharedBuffer":
        """Allocate so many 32-bit words. Raises OSError if the system has no room."""
        size_bytes = max(1, words) * WORD_BYTES
        descriptor = _anonymous_memory()
        try:
            os.ftruncate(descriptor, size_bytes)
            return cls(descriptor, size_bytes)
        except OSError:
            os.close(descriptor)
            raise

    def close(self) -> None:
        """Close the descriptor; the memory goes when no array of it is left."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


@dataclass(frozen=True)
class Layout:
    """The place of each parameter among the flat float32 values."""

    shapes: Mapping[str, tuple[int, ...]]  # in ascending order of name
    digest: str  # of names, shapes and offsets

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())

    def views(self, flat: Array) -> dict[str, Array]:
        """Return the parameters as parts of `flat`, which holds at least `elements` values; nothing is copied."""
        arrays, offset = {}, 0
        for name, shape in self.shapes.items():
            size = math.prod(shape)
            arrays[name] = flat[offset : offset + size].reshape(shape)
            offset += size
        return arrays


def layout_digest(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the SHA-256 over `name shape offset` of every parameter, sorted by name; offsets count float32
    elements."""
    digest = hashlib.sha256()
    offset = 0
    for name in sorted(shapes):
        digest.update(f"{name} {list(shapes[name])} {offset}\n".encode())
        offset += int(np.prod(shapes[name], dtype=np.int64))
    return digest.hexdigest()


def tail_words(ranks: int, values: int) -> int:
    """Return the float32 numbers in a tail of so many values a rank."""
    return ranks * values * _PARTS


def write_tail(tail: Array, index: int, values: Sequence[float]) -> None:
    """Write one rank's values into its slot and zeros into the others'."""
    tail[:] = 0.0
    width = len(values) * _PARTS
    tail[index * width : (index + 1) * width] = [part for value in values for part in _split(value)]


def read_tail(tail: Array, values: int) -> list[list[float]]:
    """Return what each rank wrote, in the order of index."""
    parts = tail.astype(np.float64).reshape(-1, values, _PARTS)
    return [[math.fsum(value) if np.isfinite(value).all() else float(value.sum()) for value in rank] for rank in parts]


def _split(value: float) -> tuple[float, float, float]:
    """Return three float32 numbers whose sum is the double; infinities (what float32 has no room for too) and NaN
    whole."""
    with np.errstate(over="ignore"):
        high = float(np.float32(value))
    if not math.isfinite(high):
        return high, 0.0, 0.0
    middle = float(np.float32(value - high))
    return high, middle, value - high - middle


def _anonymous_memory() -> int:
    """Return a descriptor of memory that no other process can open."""
    if sys.platform == "linux":
        return os.memfd_create("trainctl-sums", os.MFD_CLOEXEC)
    shared: Any = importlib.import_module("_posixshmem")
    name = f"/tc-{secrets.token_hex(6)}"  # macOS allows 31 characters
    descriptor: int = shared.shm_open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
    shared.shm_unlink(name)
    return descriptor
