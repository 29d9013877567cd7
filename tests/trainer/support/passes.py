"""Micro-batches of random tokens, and the losses and gradients of them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.data import batch as batches

Gradient = dict[str, NDArray[np.float32]]


def blocks(rows: int = 3, length: int = 20, *, first: int = 0, stop: int = 200, seed: int = 3) -> batches.Batch:
    tokens = np.random.default_rng(seed).integers(first, stop, (rows, length + 1), dtype=np.int32)
    return whole_rows(tokens)


def whole_rows(tokens) -> batches.Batch:
    """Rows of tokens as a batch, of which every target counts."""
    return batches.collate([(row, np.ones(len(row) - 1, np.bool_)) for row in np.asarray(tokens, np.int32)])


def packs(stop: int) -> tuple[batches.Batch, batches.Batch]:
    """Return six documents in three rows with padding, one of a single token; and the same in a row each."""
    chance = np.random.default_rng(4)
    lengths = np.array([9, 14, 7, 5, 20, 1])
    tokens = chance.integers(1, stop, lengths.sum() + len(lengths))
    counted = chance.integers(0, 2, len(tokens)).astype(np.uint8)
    starts = np.cumsum(lengths + 1) - lengths - 1
    packed = batches.packed(tokens, counted, starts, lengths, np.array([0, 0, 0, 1, 1, 2]))
    return packed, batches.gathered(tokens, counted, starts, lengths)


def accumulate(backend: Backend, *given: batches.Batch, scale: float = 1.0) -> None:
    """Do a step's passes over some micro-batches, but not its update."""
    backend.clear()
    for batch in given:
        backend.loss_and_gradient(batch, {"tokens": scale}, adding=nullcontext())


def loss_and_gradient(backend: Backend, *given: batches.Batch, scale: float = 1.0) -> tuple[float, Gradient]:
    accumulate(backend, *given, scale=scale)
    gradient = {name: array.copy() for name, array in backend.copy_out("accumulators").items()}
    return backend.sums().losses["tokens"], gradient


def furthest(one: Gradient, other: Gradient) -> float:
    """Return the largest difference of an array's values, relative to their norm."""
    assert one.keys() == other.keys()
    norms = {name: float(np.linalg.norm(array)) for name, array in other.items()}
    return max(float(np.linalg.norm(one[name] - other[name])) / (norm or 1e-6) for name, norm in norms.items())


def trained(load_backend: Callable[..., Any], backend: str, updates: int = 3, **changes: Any) -> Any:
    made = load_backend(backend, **changes)
    go_on(made, 0, updates)
    return made


def go_on(backend: Any, first: int, updates: int) -> None:
    for step in range(first, first + updates):
        accumulate(backend, *(blocks(seed=2 * step + part) for part in range(2)), scale=1 / 60)
        backend.update(1e-2, 1.0)
