"""One micro-batch as rectangular arrays, and the weight that its loss is divided by."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """B samples of up to L targets. Row b's first target is its second token; a causal model needs no attention
    mask for padding on the right, since no counted target can see it."""

    inputs: Tokens  # [B, L]
    targets: Tokens  # [B, L]
    counted: NDArray[np.float32]  # [B, L], 1 where the target's loss counts, 0 elsewhere and in padding
    weight: float  # counted targets

    def __len__(self) -> int:
        return len(self.inputs)

    def rows(self, chosen: NDArray[np.int64]) -> "Batch":
        """Some of the samples, padded as they are."""
        counted = self.counted[chosen]
        return Batch(self.inputs[chosen], self.targets[chosen], counted, float(counted.sum(dtype=np.float64)))


def collate(samples: Sequence[tuple[Tokens, NDArray[np.bool_]]]) -> Batch:
    """Samples of k + 1 tokens and k flags (which targets count), padded on the right to the longest."""
    longest = max(len(flags) for _, flags in samples)
    inputs = np.zeros((len(samples), longest), np.int32)
    targets = np.zeros_like(inputs)
    counted = np.zeros(inputs.shape, np.float32)
    for row, (tokens, flags) in enumerate(samples):
        inputs[row, : len(flags)] = tokens[:-1]
        targets[row, : len(flags)] = tokens[1:]
        counted[row, : len(flags)] = flags
    return Batch(inputs, targets, counted, float(counted.sum(dtype=np.float64)))


def from_blocks(blocks: Tokens) -> Batch:
    """Whole blocks, [B, L + 1] tokens, of which every target counts."""
    counted = np.ones((len(blocks), blocks.shape[1] - 1), np.float32)
    return Batch(blocks[:, :-1], blocks[:, 1:], counted, float(counted.size))
