"""Dealing of rows to worker processes: pure, so that any order of requests, deaths and late answers can be tested.

A worker that asks gets the next slice. Its size follows from the worker's speed and from what is left, as in guided
self-scheduling (Polychronopoulos and Kuck 1987): large slices first, small ones at the end, so that all workers finish
at about the same time. A slice of a lost worker is dealt again as it was. The first answer to a slice counts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

FIRST_ROWS = 4
"""Rows of a worker's first slice, when its speed is unknown."""
LONGEST_SECONDS = 2.0
"""Time that a slice should take at most."""
SHORTEST_SECONDS = 0.1
"""Time that a slice should take at least, so that requests cost little."""
LEFT_FRACTION = 0.5
"""Fraction of the remaining time, if all workers share it, that one slice may take."""
OVERDUE_SECONDS, OVERDUE_TIMES = 15.0, 5.0
"""Time, and multiple of the expected time, after which an idle worker gets a slice that another one still has."""
SLICE_BYTES = 512 * 1024
"""Size of a slice's rows, above which it ends; a single row may be larger."""
MOST_DEALS = 4
"""Deals of one slice after which its rows are taken for the reason that workers end."""
NEW_WEIGHT = 0.5
"""Weight of the last slice in a worker's speed."""


@dataclass(frozen=True)
class Slice:
    """Consecutive rows."""

    id: int
    first: int
    rows: int


@dataclass
class _Worker:
    slice: Slice | None = None  # the slice it has
    since: float = 0.0  # when it got that slice
    size_per_second: float | None = None
    rows_per_second: float | None = None
    rows: int = 0  # rows that it answered first


@dataclass
class _Dealt:
    slice: Slice
    holders: set[str] = field(default_factory=set)
    deals: int = 0


class Dealer:
    """Deals rows of the given sizes; times are seconds by any clock that only grows."""

    def __init__(
        self, sizes: Sequence[int], most_rows: int, dealt: Iterable[tuple[Slice, bool]] = (), *, alike: bool = False
    ) -> None:
        """`dealt`: slices of an earlier dealer of the same rows, in order, and whether each was answered. `alike`: a
        row's size says nothing about its time, and a row may take long, as for answers."""
        self._bytes_before, self._most_rows = [0, *accumulate(sizes)], most_rows
        self._before = [*range(len(sizes) + 1)] if alike else self._bytes_before
        self._first_rows = 1 if alike else FIRST_ROWS
        self._next_row = self._next_id = self.answered_rows = 0
        self._open: dict[int, _Dealt] = {}  # slices without an answer, by ID
        self._workers: dict[str, _Worker] = {}
        for known, answered in dealt:
            self._next_row, self._next_id = known.first + known.rows, known.id + 1
            if answered:
                self.answered_rows += known.rows
            else:
                self._open[known.id] = _Dealt(known)

    @property
    def rows(self) -> int:
        return len(self._before) - 1

    @property
    def is_done(self) -> bool:
        """Return whether every row is answered."""
        return self.answered_rows == self.rows

    @property
    def slices(self) -> int:
        """Slices dealt so far."""
        return self._next_id

    @property
    def slices_answered(self) -> int:
        return self._next_id - len(self._open)

    def rows_of(self, worker: str) -> int:
        """Rows that a worker has answered."""
        return self._worker(worker).rows

    def speed(self, worker: str) -> float | None:
        """A worker's rows per second, None before its first answer."""
        return self._worker(worker).rows_per_second

    def pending(self, slice_id: int) -> Slice | None:
        """A slice that has no answer yet, by its ID."""
        dealt = self._open.get(slice_id)
        return dealt.slice if dealt is not None else None

    def held(self, worker: str) -> Slice | None:
        """The slice that a worker has."""
        return self._worker(worker).slice

    def repeatedly_lost(self) -> Slice | None:
        """A slice that was dealt too often without an answer."""
        lost = (one.slice for one in self._open.values() if one.deals >= MOST_DEALS and not one.holders)
        return next(lost, None)

    def deal(self, worker: str, now: float) -> Slice | None:
        """The slice for a worker that asks: the one it has, in case the reply was lost, or another one; None if there
        is nothing to do now."""
        own = self._worker(worker)
        if own.slice is not None:
            return own.slice
        dealt = next((one for one in self._open.values() if not one.holders), None)
        dealt = dealt or self._next_slice(own) or self._overdue(now)
        if dealt is None:
            return None
        dealt.holders.add(worker)
        dealt.deals += 1
        own.slice, own.since = dealt.slice, now
        return own.slice

    def answer(self, worker: str, slice_id: int, now: float) -> Slice | None:
        """A worker has answered a slice: the slice, or None if it had an answer already."""
        own, dealt = self._worker(worker), self._open.pop(slice_id, None)
        if own.slice is not None and own.slice.id == slice_id:
            self._measure(own, now - own.since)
            own.slice = None
        if dealt is None:
            return None
        own.rows += dealt.slice.rows
        self.answered_rows += dealt.slice.rows
        return dealt.slice

    def lose(self, worker: str) -> None:
        """A worker has ended or is silent: its slice is dealt again."""
        own = self._worker(worker)
        if own.slice is not None and (dealt := self._open.get(own.slice.id)) is not None:
            dealt.holders.discard(worker)
        own.slice = None
        own.size_per_second = own.rows_per_second = None

    def _worker(self, worker: str) -> _Worker:
        return self._workers.setdefault(worker, _Worker())

    def _measure(self, own: _Worker, seconds: float) -> None:
        assert own.slice is not None
        if seconds <= 0:
            return
        size_per_second, rows_per_second = self._size(own.slice) / seconds, own.slice.rows / seconds
        if own.size_per_second is not None and own.rows_per_second is not None:
            size_per_second += (1 - NEW_WEIGHT) * (own.size_per_second - size_per_second)
            rows_per_second += (1 - NEW_WEIGHT) * (own.rows_per_second - rows_per_second)
        own.size_per_second, own.rows_per_second = size_per_second, rows_per_second

    def _size(self, one: Slice) -> int:
        return self._before[one.first + one.rows] - self._before[one.first]

    def _next_slice(self, own: _Worker) -> _Dealt | None:
        first = self._next_row
        if first >= self.rows:
            return None
        count, wanted = 1, self._wanted_size(own)
        most = self._most_rows if wanted is not None else self._first_rows
        while first + count < self.rows and count < most:
            stop = first + count + 1
            if self._bytes_before[stop] - self._bytes_before[first] > SLICE_BYTES:
                break
            if wanted is not None and self._before[stop] - self._before[first] > wanted:
                break
            count += 1
        made = _Dealt(Slice(self._next_id, first, count))
        self._next_row, self._next_id = first + count, self._next_id + 1
        self._open[made.slice.id] = made
        return made

    def _wanted_size(self, own: _Worker) -> float | None:
        if own.size_per_second is None:
            return None
        left = self._before[-1] - self._before[self._next_row]
        together = sum(worker.size_per_second or 0.0 for worker in self._workers.values())
        seconds = min(LONGEST_SECONDS, max(SHORTEST_SECONDS, LEFT_FRACTION * left / together))
        return own.size_per_second * seconds

    def _overdue(self, now: float) -> _Dealt | None:
        """A slice that takes its workers far longer than expected: they may hang."""

        def is_overdue(holder: str, one: Slice) -> bool:
            own = self._worker(holder)
            expected = self._size(one) / own.size_per_second if own.size_per_second else 0.0
            return now - own.since > max(OVERDUE_SECONDS, OVERDUE_TIMES * expected)

        dealt = self._open.values()
        return next((one for one in dealt if all(is_overdue(who, one.slice) for who in one.holders)), None)
