"""A metric over a run in bounded memory: buckets of min, max, mean and last that fold to half as many when full."""

import math
import mmap
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.messages import Series

CAPACITY = 512
"""Buckets a window holds before it folds; even, so that a fold halves it."""

_ROOM = 1025
"""Buckets that a window is given at least, as far as its capacity goes."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_COLUMNS = ("minimum", "maximum", "total", "count", "last")
_ARRAYS = ("first", *_COLUMNS, "broken")


@dataclass(frozen=True)
class Window:
    """Parallel arrays, one entry a bucket that has a step; bucket i covers `bucket_steps` steps from `first[i]`.

    Buckets begin at multiples of their size. A bucket without a step is absent: a gap.
    `broken` counts the non-finite values of a bucket, which its other columns leave out (NaN if there were only such).
    """

    bucket_steps: int
    first: Ints
    minimum: Floats
    maximum: Floats
    total: Floats
    count: Floats
    last: Floats
    broken: Ints
    capacity: int = CAPACITY
    store: "Store | None" = field(default=None, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.first)

    @property
    def mean(self) -> Floats:
        """Return mean of each bucket's finite values; NaN where there were none."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.where(self.count > 0, self.total / self.count, np.nan)

    @property
    def newest_step(self) -> int:
        """Return last step the window covers, 0 when empty."""
        return int(self.first[-1]) + self.bucket_steps - 1 if len(self) else 0


class Store:
    """Room that windows grow in, so that a value more costs no copy and memory stays as it was from the start.

    A window's arrays are its first entries. The newest window, which has all that is written, may be added to in place;
    the ones before it don't see that, for they end where they did.

    It is in pages of its own: all series of a run fold at one step, and what the heap gets back then it keeps.
    """

    def __init__(self, window: Window) -> None:
        self.used = len(window)
        room = min(window.capacity + 1, max(2 * self.used, _ROOM)) if self.used <= window.capacity else self.used + 1
        self.room, columns = room, len(_COLUMNS)
        pages = mmap.mmap(-1, (columns + 2) * room * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = np.frombuffer(pages, np.float64, columns * room)
        self._floats = self._memory.reshape(columns, room)
        self._whole = np.frombuffer(pages, np.int64, 2 * room, columns * room * 8).reshape(2, room)
        self._floats[:], self._whole[:] = np.nan, 0  # written, for pages take memory only as they are
        for row, name in zip(self._floats, _COLUMNS, strict=True):
            row[: self.used] = getattr(window, name)
        self._whole[0, : self.used], self._whole[1, : self.used] = window.first, window.broken

    def takes(self, window: Window) -> bool:
        """Return whether a value can be written after this window's last."""
        return window.last.base is self._memory and len(window) == self.used < self.room

    def grown(self, window: Window, start: int, values: Sequence[float], broken: int) -> Window:
        """Return the window with a bucket after its last; `values` are in the order of the columns."""
        end = self.used = self.used + 1
        self._floats[:, end - 1] = values
        self._whole[:, end - 1] = start, broken
        return self.window(window)

    def merge(self, place: int, value: float, finite: bool) -> None:
        """Add a value to a bucket, which nobody may have seen."""
        if not finite:
            self._whole[1, place] += 1
            return
        minimum, maximum, total, count, _ = self._floats[:, place]
        self._floats[:, place] = np.fmin(minimum, value), np.fmax(maximum, value), total + value, count + 1, value

    def window(self, like: Window) -> Window:
        """Return all that is written, with the buckets and the capacity of another window."""
        first, broken = self._whole[:, : self.used]
        return _like(like, (first, *self._floats[:, : self.used], broken), self)


def empty(capacity: int = CAPACITY, bucket_steps: int = 1) -> Window:
    """Return a window without a value."""
    floats = np.empty(0)
    whole = np.empty(0, np.int64)
    return Window(bucket_steps, whole, floats, floats, floats, floats, floats, whole, capacity)


def add(window: Window, step: int, value: float) -> Window:
    """Return the window with one more value; a step seen before adds to its bucket, for a redo must not hide what it
    redid."""
    start = step // window.bucket_steps * window.bucket_steps
    finite = math.isfinite(value)
    if not len(window) or start > window.first[-1]:  # as nearly always
        return _stored(fold(_appended(window, start, value, finite)))
    place = int(np.searchsorted(window.first, start))
    if place < len(window) and window.first[place] == start:
        store = Store(window)
        store.merge(place, value, finite)
        return store.window(window)
    bucket = (start, *_single(value, finite), int(not finite))
    made = [np.insert(getattr(window, name), place, new) for name, new in zip(_ARRAYS, bucket, strict=True)]
    return _stored(fold(_like(window, made)))


def _single(value: float, finite: bool) -> tuple[float, ...]:
    shown = value if finite else math.nan
    return shown, shown, value if finite else 0.0, float(finite), shown


def _stored(window: Window) -> Window:
    """Return the same in a store, if it isn't in one."""
    return window if window.store is not None else Store(window).window(window)


def _appended(window: Window, start: int, value: float, finite: bool) -> Window:
    """Return the window with a bucket after the last: nearly every value is one, so it takes no general insertion."""
    store = window.store
    if store is None or not store.takes(window):
        store = Store(window)
    return store.grown(window, start, _single(value, finite), int(not finite))


def from_series(series: Series, newest_step: int, capacity: int = CAPACITY) -> Window:
    """Return the agent's buckets as a window. A bucket's count of steps isn't sent: it is full, and the newest has
    begun."""
    first = np.asarray(series.steps, np.int64)
    order = np.argsort(first, kind="stable")
    columns = [
        np.asarray(values, np.float64)[order] for values in (series.minimum, series.maximum, series.mean, series.last)
    ]
    first = first[order]
    finite = np.isfinite(columns[0]) & np.isfinite(columns[1]) & np.isfinite(columns[2])
    covered = np.clip(newest_step - first + 1, 1, series.bucket_steps)
    count = np.where(np.isfinite(columns[2]), covered, 0).astype(np.float64)
    minimum, maximum, last = (np.where(np.isfinite(columns[at]), columns[at], np.nan) for at in (0, 1, 3))
    total = np.where(count > 0, columns[2], 0.0) * count
    broken = np.where(finite, 0, 1).astype(np.int64)
    window = Window(series.bucket_steps, first, minimum, maximum, total, count, last, broken, capacity)
    return fold(_rebucket(window, series.bucket_steps))


def appended(window: Window, newer: Window, after: int) -> Window:
    """Return the window with the newer one's buckets that begin after step `after`, which is at least its own newest
    bucket's first step; each goes where its first step falls."""
    more = tail(newer, after + 1)
    if not len(more):
        return window
    both = [np.concatenate([getattr(window, name), getattr(more, name)]) for name in _ARRAYS]
    return _rebucket(_like(window, both), window.bucket_steps)


def combined(windows: Sequence[Window]) -> Window:
    """Return several series as one, in the coarsest one's buckets: of each the least, the greatest, and what gives the
    mean of all values; its last is the mean of their last."""
    size = max((window.bucket_steps for window in windows), default=1)
    parts = [_rebucket(window, size) for window in windows if len(window)]
    if not parts:
        return empty(bucket_steps=size)
    first = np.unique(np.concatenate([part.first for part in parts]))
    places = [np.searchsorted(first, part.first) for part in parts]

    def laid(name: str, nothing: float) -> Floats:
        table = np.full((len(parts), len(first)), nothing)
        for row, part, place in zip(table, parts, places, strict=True):
            row[place] = getattr(part, name)
        return table

    last = laid("last", np.nan)
    known = np.isfinite(last)
    with np.errstate(invalid="ignore"):
        mean_last = np.where(known, last, 0.0).sum(axis=0) / known.sum(axis=0)
    return Window(
        size,
        first,
        np.fmin.reduce(laid("minimum", np.nan)),
        np.fmax.reduce(laid("maximum", np.nan)),
        laid("total", 0.0).sum(axis=0),
        laid("count", 0.0).sum(axis=0),
        mean_last,
        laid("broken", 0.0).sum(axis=0).astype(np.int64),
        max(window.capacity for window in windows),
    )


def means(window: Window) -> Window:
    """Return the window with the mean of each bucket in the place of its extremes, so that it draws as a line."""
    mean = window.mean
    return replace(window, minimum=mean, maximum=mean, store=None) if window.bucket_steps > 1 else window


def fold(window: Window) -> Window:
    """Return the window at the coarsest resolution it needs: bucket size doubled until it is within its capacity."""
    while len(window) > window.capacity:
        window = _rebucket(window, window.bucket_steps * 2)
    return window


def tail(window: Window, first_step: int) -> Window:
    """Return the part from `first_step` on; a bucket is kept when it begins there or later."""
    place = int(np.searchsorted(window.first, first_step))
    return _like(window, [getattr(window, name)[place:] for name in _ARRAYS])


def head(window: Window, last_step: int) -> Window:
    """Return the part up to `last_step`; a bucket is kept when it begins there or earlier."""
    place = int(np.searchsorted(window.first, last_step, side="right"))
    return _like(window, [getattr(window, name)[:place] for name in _ARRAYS])


def _like(window: Window, arrays: Iterable[Any], store: Store | None = None) -> Window:
    """Return other buckets of the same size, with the same capacity; `arrays` in the order of the fields."""
    columns = dict(zip(_ARRAYS, arrays, strict=True))
    return Window(window.bucket_steps, **columns, capacity=window.capacity, store=store)


def typical(window: Window, newest: int = 8) -> float | None:
    """Return median of the last values: what it is like now, without one odd step. None when nothing finite is
    there."""
    values = [value for value in window.last[-newest:].tolist() if math.isfinite(value)]
    return statistics.median(values) if values else None


def recent_mean(window: Window, steps: int) -> float | None:
    """Return the mean of the finite values of the last `steps` steps, as near as the buckets come to that (at least the
    newest one). None when nothing finite is there."""
    newest = max(steps // window.bucket_steps, 1)
    count = float(np.sum(window.count[-newest:]))
    return float(np.sum(window.total[-newest:])) / count if count else None


def trend(window: Window, over_steps: int) -> float | None:
    """Return relative change over the last `over_steps` steps: the mean of the newest sixteenth of them, against that
    of as many steps just before them.

    None while the window doesn't go back that far, or either has no finite value.
    """
    size = max(over_steps // 16, 2 * window.bucket_steps)  # the newest bucket may have just begun
    end = window.newest_step
    now, then = _mean_of(window, end - size + 1, end), _mean_of(window, end - over_steps - size + 1, end - over_steps)
    if not len(window) or int(window.first[0]) > end - over_steps - size + 1 or now is None or not then:
        return None
    return (now - then) / abs(then)


def _mean_of(window: Window, first_step: int, last_step: int) -> float | None:
    within = (window.first >= first_step) & (window.first <= last_step)
    count = float(np.sum(window.count[within]))
    return float(np.sum(window.total[within])) / count if count else None


def _rebucket(window: Window, bucket_steps: int) -> Window:
    """Return buckets of another size, a multiple of the present one; those that fall together are merged."""
    starts, place = np.unique(window.first // bucket_steps * bucket_steps, return_inverse=True)
    heads = np.searchsorted(place, np.arange(len(starts)))
    if not len(starts):
        return replace(window, bucket_steps=bucket_steps)
    known = np.where(np.isfinite(window.last), np.arange(len(window)), -1)
    newest = np.maximum.reduceat(known, heads)
    return Window(
        bucket_steps,
        starts.astype(np.int64),
        np.fmin.reduceat(window.minimum, heads),
        np.fmax.reduceat(window.maximum, heads),
        np.add.reduceat(window.total, heads),
        np.add.reduceat(window.count, heads),
        np.where(newest >= 0, window.last[np.maximum(newest, 0)], np.nan),
        np.add.reduceat(window.broken, heads),
        window.capacity,
    )
