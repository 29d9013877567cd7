"""A rank's peak memory by micro-batch: what it holds anyway, and what each sample of a pass adds."""

import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

LEAST_SPREAD = 0.5
"""Relative difference of the largest micro-batch from the smallest below which peaks don't tell a sample's part."""

Peak = tuple[int, float]
"""A micro-batch in samples, and the most bytes that a step of it held."""


class MemoryModel(NamedTuple):
    """Of one data type and sequence length: peak bytes = base + slope * micro-batch. Measured with torch and MLX, a
    line is as good as more terms: what activations, logits and gradients take grows with the samples of a pass."""

    base_bytes: float  # weights, optimizer state, gradients and libraries
    sample_bytes: float  # activations and logits of a sample

    def peak(self, micro: int) -> float:
        """Bytes at the peak of a step with so many samples in a pass."""
        return self.base_bytes + self.sample_bytes * micro

    def most(self, limit_bytes: float, largest: int) -> int:
        """The largest micro-batch whose peak is within `limit_bytes`, at most `largest`; 0 if there is none."""
        if self.peak(1) > limit_bytes:
            return 0
        room = limit_bytes - self.base_bytes
        return largest if room >= self.sample_bytes * largest else int(room / self.sample_bytes)

    def through(self, micro: int, peak_bytes: float) -> "MemoryModel":
        """The same slope through a peak that was measured later: another process holds other libraries and buffers."""
        return MemoryModel(peak_bytes - self.sample_bytes * micro, self.sample_bytes)


def fit(peaks: Collection[Peak]) -> MemoryModel | None:
    """The line through measured peaks that is robust to odd ones; None if their micro-batches differ too little, or
    the peaks don't grow with them.

    The slope is the median of those between all pairs, each counted by the distance of its micro-batches (Theil and
    Sen, weighted), because the allocator's pages blur the difference of neighbours.
    """
    sizes = [micro for micro, _ in peaks]
    if not sizes or max(sizes) < (1 + LEAST_SPREAD) * min(sizes):
        return None
    ordered = sorted(peaks)
    pairs = [
        (late[0] - early[0], (late[1] - early[1]) / (late[0] - early[0]))
        for place, early in enumerate(ordered)
        for late in ordered[place + 1 :]
        if late[0] > early[0]
    ]
    slope = _weighted_median([(of_pair, distance) for distance, of_pair in pairs])
    if slope <= 0:
        return None
    return MemoryModel(statistics.median(peak - slope * micro for micro, peak in ordered), slope)


def _weighted_median(values: Iterable[tuple[float, float]]) -> float:
    """The value up to which half of the weights come."""
    ordered: Sequence[tuple[float, float]] = sorted(values)
    half, passed = sum(weight for _, weight in ordered) / 2, 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= half:
            return value
    raise ValueError("no values")
