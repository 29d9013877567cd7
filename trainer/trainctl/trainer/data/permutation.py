"""The order of samples: a specified integer permutation per (seed, epoch), and packs of short samples.

The endless sequence of positions has a sample at each. Specification, so that another program can reproduce it (all
arithmetic on unsigned 64-bit integers, wrapping):

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

Packing puts several short samples in one of up to `sequence_length` targets, by best-fit decreasing. Samples are taken
longest first, those of one length in the order of the permutation keyed by (seed, `PACKING_KEY`). Each goes to the pack
with the least room that is enough for it, or else to a new pack (Johnson 1973). Samples of one length are placed
together: a pack that was the best fit stays it until its room is too small.
"""

import functools
import hashlib
import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.messages import Range
from trainctl.trainer.common.reference_cache import spans

Indices = NDArray[np.int64]
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_ROUNDS = 8
_DRAWN_AT_ONCE = 1 << 20
"""Random values made at once, so that a large weight takes little memory beside its own."""


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's output function to each element."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(indices: Indices, size: int, seed: int, epoch: int) -> Indices:
    """Return the images of `indices` (each in [0, size)) under the permutation of [0, size) keyed by (seed, epoch)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = _feistel(indices.astype(np.uint64), half, keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        values[outside] = _feistel(values[outside], half, keys)
        outside = outside[values[outside] >= size]
    return values.astype(np.int64)


def samples_at(positions: Indices, size: int, seed: int) -> Indices:
    """Return the sample at each position: element p mod N of epoch p div N's permutation, N = `size`."""
    samples = np.empty(len(positions), np.int64)
    epochs = positions // size
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = permute(positions[here] % size, size, seed, int(epoch))
    return samples


def uniform(shape: tuple[int, ...], key: int, bound: float) -> NDArray[np.float32]:
    """Return random values from -bound to bound, of 24 bits each: `mix` over a counter that starts at `key` * 2^32."""
    start = np.uint64(key & (_MASK >> 32)) << np.uint64(32)
    values = np.empty(math.prod(shape), np.float32)
    for first in range(0, len(values), _DRAWN_AT_ONCE):
        piece = values[first : first + _DRAWN_AT_ONCE]
        counter = start + np.arange(first, first + len(piece), dtype=np.uint64)
        unit = ((mix(mix(counter)) >> np.uint64(40)).astype(np.float64) + 0.5) / 2**24
        piece[:] = (2 * unit - 1) * bound
    return values.reshape(shape)


def positions_of(ranges: Iterable[Range]) -> Indices:
    """Return all positions of `ranges`, in the order given."""
    parts = [np.arange(part.start, part.start + part.count, dtype=np.int64) for part in ranges]
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def ranges_of(positions: Indices) -> tuple[Range, ...]:
    """Return the fewest ascending ranges that hold exactly `positions`."""
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


PACKING_KEY = 0x7061636B  # "pack"


@dataclass(frozen=True)
class Packs:
    """Samples in packs: those of pack p are `members[offsets[p] : offsets[p + 1]]`."""

    members: Indices
    offsets: Indices

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def members_of(self, packs: Indices) -> tuple[Indices, Indices]:
        """Return the samples of some packs, one pack after the other, and the place of each one's pack in `packs`."""
        counts = self.offsets[packs + 1] - self.offsets[packs]
        return self.members[spans(self.offsets[packs], counts)], np.repeat(np.arange(len(packs)), counts)

    def sums(self, values: NDArray[np.int64]) -> Indices:
        """Return the sum of the samples' values over each pack."""
        sums: Indices = np.add.reduceat(values[self.members], self.offsets[:-1])
        return sums

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.members.tobytes() + self.offsets.tobytes()).hexdigest()


def best_fit(lengths: Indices, capacity: int, seed: int) -> Packs:
    """Return packs of samples of `lengths`, each from 1 to `capacity`, whose sums are at most `capacity`."""
    drawn = permute(np.arange(len(lengths)), len(lengths), seed, PACKING_KEY)
    order = np.lexsort((drawn, -lengths))
    pack_of = _placed(lengths[order], capacity)
    by_pack = np.argsort(pack_of, kind="stable")
    return Packs(order[by_pack], np.concatenate([[0], np.cumsum(np.bincount(pack_of))]))


def _placed(lengths: Indices, capacity: int) -> Indices:
    """Return the pack of each sample; `lengths` descend."""
    pack_of = np.empty(len(lengths), np.int64)
    rooms = _Rooms()
    packs = 0
    starts = np.flatnonzero(np.diff(lengths, prepend=capacity + 1))
    for done, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(lengths)], strict=True):
        length = int(lengths[done])
        while done < stop:
            room, open_packs = rooms.take(length) or (capacity, np.empty(0, np.int64))
            fit = room // length
            if not len(open_packs):
                open_packs = np.arange(packs, packs + max(1, (stop - done) // fit))
                packs += len(open_packs)
            each = min(fit, stop - done)
            used = open_packs[: (stop - done) // each]
            pack_of[done : done + each * len(used)] = np.repeat(used, each)
            done += each * len(used)
            rooms.put(room - each * length, used)
            rooms.put(room, open_packs[len(used) :])
    return pack_of


class _Rooms:
    """Packs by the room they have left."""

    def __init__(self) -> None:
        self._sizes: list[int] = []  # rooms of some pack, ascending
        self._packs: dict[int, list[Indices]] = {}

    def put(self, room: int, packs: Indices) -> None:
        if room and len(packs):
            if room not in self._packs:
                insort(self._sizes, room)
            self._packs.setdefault(room, []).append(packs)

    def take(self, length: int) -> tuple[int, Indices] | None:
        """Return the least room of at least `length`, and some of the packs that have it."""
        place = bisect_left(self._sizes, length)
        if place == len(self._sizes):
            return None
        room = self._sizes[place]
        packs = self._packs[room].pop()
        if not self._packs[room]:
            del self._packs[room], self._sizes[place]
        return room, packs
