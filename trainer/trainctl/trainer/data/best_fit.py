"""Packing: several short samples in one of up to `sequence_length` targets, by best-fit decreasing.

Samples are taken longest first, those of one length in the order of the permutation keyed by (seed, `PACKING_KEY`).
Each goes to the pack with the least room that is enough for it, or else to a new pack (Johnson 1973). Samples of one
length are placed together: a pack that was the best fit stays it until its room is too small.
"""

import hashlib
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainctl.trainer.data.permutation import Indices, permute

PACKING_KEY = 0x7061636B  # "pack"


@dataclass(frozen=True)
class Packs:
    """Which samples are in each pack: those of pack p are `members[offsets[p] : offsets[p + 1]]`."""

    members: Indices
    offsets: Indices

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sums(self, values: NDArray[np.int64]) -> Indices:
        """Of a value of each sample, over each pack."""
        found: Indices = np.add.reduceat(values[self.members], self.offsets[:-1])
        return found

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.members.tobytes() + self.offsets.tobytes()).hexdigest()


def best_fit(lengths: Indices, capacity: int, seed: int) -> Packs:
    """Packs of samples of `lengths`, each from 1 to `capacity`, whose sums are at most `capacity`."""
    drawn = permute(np.arange(len(lengths)), len(lengths), seed, PACKING_KEY)
    order = np.lexsort((drawn, -lengths))
    pack_of = _placed(lengths[order], capacity)
    by_pack = np.argsort(pack_of, kind="stable")
    return Packs(order[by_pack], np.concatenate([[0], np.cumsum(np.bincount(pack_of))]))


def _placed(lengths: Indices, capacity: int) -> Indices:
    """The pack of each sample; `lengths` descend."""
    pack_of = np.empty(len(lengths), np.int64)
    rooms = _Rooms()
    packs = 0
    starts = np.flatnonzero(np.diff(lengths, prepend=capacity + 1))
    for done, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(lengths)], strict=True):
        length = int(lengths[done])
        while done < stop:
            room, open_packs = rooms.take(length) or (capacity, np.empty(0, np.int64))
            most = room // length
            if not len(open_packs):
                open_packs = np.arange(packs, packs + max(1, (stop - done) // most))
                packs += len(open_packs)
            each = min(most, stop - done)
            used = open_packs[: (stop - done) // each]
            pack_of[done : done + each * len(used)] = np.repeat(used, each)
            done += each * len(used)
            rooms.put(room - each * length, used)
            rooms.put(room, open_packs[len(used) :])
    return pack_of


class _Rooms:
    """Packs by the room they have left."""

    def __init__(self) -> None:
        self._known: list[int] = []  # rooms of some pack, ascending
        self._packs: dict[int, list[Indices]] = {}

    def put(self, room: int, packs: Indices) -> None:
        if room and len(packs):
            if room not in self._packs:
                insort(self._known, room)
            self._packs.setdefault(room, []).append(packs)

    def take(self, length: int) -> tuple[int, Indices] | None:
        """The least room of at least `length`, and some of the packs that have it."""
        place = bisect_left(self._known, length)
        if place == len(self._known):
            return None
        room = self._known[place]
        packs = self._packs[room].pop()
        if not self._packs[room]:
            del self._packs[room], self._known[place]
        return room, packs
