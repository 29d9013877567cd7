"""The sample at each position of the endless sequence: a specified integer permutation per (seed, epoch).

Specification, so that another program can reproduce it (all arithmetic on unsigned 64-bit integers, wrapping):

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31
             (the output function of SplitMix64: Steele, Lea and Flood 2014)
    G      = 0x9E3779B97F4A7C15
    base   = mix(mix(seed + G) + epoch + G)
    key_r  = mix(base + (r + 1) * G)                     for r in 0..7
    half   = max(1, ceil(bit_length(N - 1) / 2))         bits of each half
    feistel(x):  L, R = x >> half, x & (2^half - 1)
                 eight times, r = 0..7:  L, R = R, L ^ (mix(R ^ key_r) >> (64 - half))
                 the result is (L << half) | R
    permute(i) = feistel applied to i again and again until the result is below N (cycle walking)

Cycle walking is Black and Rogaway's (2002). A Feistel network is a bijection of [0, 4^half) whatever its round
function, and walking a bijection's cycles back into [0, N) is a bijection of [0, N). For N > 2, 4^half < 4 N, so the
walk takes fewer than four rounds on average.
"""

import functools
import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.messages import Range

Indices = NDArray[np.int64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
_DRAWN_AT_ONCE = 1 << 20
"""Random values made at once, so that a large weight takes little memory beside its own."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's output function, element by element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: Indices, size: int, seed: int, epoch: int) -> Indices:
    """The images of `indices` (each in [0, size)) under the permutation of [0, size) keyed by (seed, epoch)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = _feistel(indices.astype(np.uint64), half, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def samples_at(positions: Indices, size: int, seed: int) -> Indices:
    """The sample at each position: element p mod N of epoch p div N's permutation, N = `size`."""
    found = np.empty(len(positions), np.int64)
    epochs = positions // size
    for epoch in np.unique(epochs):
        here = epochs == epoch
        found[here] = permute(positions[here] % size, size, seed, int(epoch))
    return found


def uniform(shape: tuple[int, ...], key: int, bound: float) -> NDArray[np.float32]:
    """Random values from -bound to bound, of 24 bits each: `mix` over a counter that starts at `key` * 2^32."""
    start = np.uint64(key & (_MASK >> 32)) << np.uint64(32)
    values = np.empty(math.prod(shape), np.float32)
    for first in range(0, len(values), _DRAWN_AT_ONCE):
        piece = values[first : first + _DRAWN_AT_ONCE]
        counter = start + np.arange(first, first + len(piece), dtype=np.uint64)
        unit = ((mix(mix(counter)) >> np.uint64(40)).astype(np.float64) + 0.5) / 2**24
        piece[:] = (2 * unit - 1) * bound
    return values.reshape(shape)


def positions_of(ranges: Iterable[Range]) -> Indices:
    """All positions of `ranges`, in the order given."""
    parts = [np.arange(part.start, part.start + part.count, dtype=np.int64) for part in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def ranges_of(positions: Indices) -> tuple[Range, ...]:
    """The fewest ascending ranges that hold exactly `positions`."""
    if not len(positions):
        return ()
    ordered = np.unique(positions)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    return tuple(Range(int(run[0]), len(run)) for run in np.split(ordered, breaks))


def _feistel(values: NDArray[np.uint64], half: int, keys: list[int]) -> NDArray[np.uint64]:
    shift, low, down = np.uint64(half), np.uint64((1 << half) - 1), np.uint64(64 - half)
    left, right = values >> shift, values & low
    for key in keys:
        left, right = right, left ^ (mix(right ^ np.uint64(key)) >> down)
    return (left << shift) | right


@functools.lru_cache
def _round_keys(seed: int, epoch: int) -> list[int]:
    base = _mix_one(_mix_one(seed + _GOLDEN) + epoch + _GOLDEN)
    return [_mix_one(base + (turn + 1) * _GOLDEN) for turn in range(_ROUNDS)]


def _mix_one(value: int) -> int:
    return int(mix(np.array([value & _MASK], np.uint64))[0])
