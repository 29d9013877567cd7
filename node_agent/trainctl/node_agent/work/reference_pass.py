"""A reference's log-probabilities, computed by all ranks that load: which rank computes which units. Pure.

Slices are dealt as those of other separate work are. Values that follow the first one without a gap can be handed on
at once, so ranks fetch those of others while they compute.
"""

import struct
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from trainctl.node_agent.work.dealer import Dealer, Slice

VALUE_BYTES = 4
MOST_UNITS = 1024
"""Units of a slice at most."""


class UnitSizes(NamedTuple):
    """Of each unit, as a rank tells them: little-endian uint32."""

    counts: bytes  # values
    tokens: bytes  # tokens to process

    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Raises ValueError if they are no two lists of the same length."""
        counts, tokens = (struct.unpack(f"<{len(raw) // 4}I", raw) for raw in self)
        if len(counts) != len(tokens):
            raise ValueError(f"{len(counts)} counts for {len(tokens)} units")
        return counts, tokens


class ReferencePass:
    """Times are seconds by any clock that only grows; ranks are workers by their number."""

    def __init__(
        self, counts: Sequence[int], tokens: Sequence[int], dealt: Iterable[tuple[Slice, bool]] = ()
    ) -> None:  # fmt: skip
        """`dealt`: slices of an earlier agent, in order, and whether each was answered."""
        known = [*dealt]
        self._starts = [0, *accumulate(counts)]
        self._dealer = Dealer([VALUE_BYTES * size for size in tokens], MOST_UNITS, known)
        self._answered = {one.first: one.first + one.rows for one, done in known if done}
        self._whole = 0  # units from the first one on that all have values
        self._grow()

    @property
    def values(self) -> int:
        """All there will be."""
        return self._starts[-1]

    @property
    def available(self) -> int:
        """Values from the first one on that are there without a gap."""
        return self._starts[self._whole]

    @property
    def answered(self) -> int:
        """Units that have values."""
        return self._dealer.answered_rows

    @property
    def is_done(self) -> bool:
        return self._dealer.is_done

    def deal(self, rank: int, now: float) -> Slice | None:
        """The slice for a rank that asks; None if there is nothing to do now."""
        return self._dealer.deal(str(rank), now)

    def is_new(self, one: Slice) -> bool:
        """Whether it is a slice of this pass without an answer. Those of another lead differ."""
        return self._dealer.pending(one.id) == one

    def span(self, one: Slice) -> tuple[int, int]:
        """The first of a slice's values, and how many there are."""
        start = self._starts[one.first]
        return start, self._starts[one.first + one.rows] - start

    def answer(self, rank: int, one: Slice, now: float) -> None:
        """A rank's values of a slice are kept."""
        if self._dealer.answer(str(rank), one.id, now) is not None:
            self._answered[one.first] = one.first + one.rows
            self._grow()

    def lose(self, rank: int) -> None:
        """A rank has ended or is silent: its slice is dealt again."""
        self._dealer.lose(str(rank))

    def _grow(self) -> None:
        while self._whole in self._answered:
            self._whole = self._answered.pop(self._whole)
