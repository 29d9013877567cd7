"""A canvas of dots, 2 x 4 to a terminal cell in braille, and the strokes that keep every extreme.

Values fall into dot columns by min and max, so a spike one step wide is drawn whatever the scale; a missing bucket
leaves its columns empty; a value that isn't finite is marked, never drawn as a number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trainctl.tui.text.styled_line import Line, Piece

Floats = NDArray[np.float64]

ACROSS, DOWN = 2, 4
"""Dots of a terminal cell."""
# Bit of the dot at (row, column) within a braille cell: Unicode chart "Braille Patterns", U+2800.
_BITS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.int64)
_BRAILLE = np.array([ord(" "), *range(0x2801, 0x2900)], dtype="<u4")


@dataclass(frozen=True)
class Curve:
    """One series to draw: bucket i spans `x[i] .. x[i] + span` and holds values from `low[i]` to `high[i]`.

    NaN in `low` and `high` is a bucket without a finite value. `role` is its colour's name. `joins`, of len(x) - 1,
    says which buckets a line joins to the next; without it those do that begin within one and a half spans.
    """

    x: Floats
    low: Floats
    high: Floats
    span: float
    role: str
    joins: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Frame:
    """The part of the plane that is drawn, and its terminal cells."""

    x0: float
    x1: float
    y0: float
    y1: float
    columns: int
    rows: int

    @property
    def dots(self) -> tuple[int, int]:
        """Return the columns and rows of dots."""
        return self.columns * ACROSS, self.rows * DOWN

    def column_of(self, x: float) -> int:
        """Return the terminal column of an x value, which may lie outside."""
        return int((x - self.x0) / (self.x1 - self.x0) * self.columns)

    def row_of(self, y: float) -> int:
        """Return the terminal row of a y value, clamped to the frame, 0 at the top."""
        across = (self.y1 - y) / (self.y1 - self.y0)
        return min(max(int(across * self.rows), 0), self.rows - 1)


def extents(curves: Sequence[Curve], frame: Frame) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return per curve and dot column the lowest and the highest value (NaN where there is none), and whether a line
    joins it to the next.

    Between buckets wider than a column the line is interpolated; it breaks where a bucket is missing.
    """
    width = frame.dots[0]
    shape = (len(curves), width)
    low, high, joined = np.full(shape, np.nan), np.full(shape, np.nan), np.zeros(shape, bool)
    if not sum(len(curve.x) for curve in curves) or width == 0 or frame.x1 <= frame.x0:
        return low, high, joined
    x, lows, highs, ties = (np.concatenate(parts) for parts in zip(*map(_parts, curves), strict=True))
    columns = np.floor((x - frame.x0) * (width / (frame.x1 - frame.x0)) + 1e-9).astype(np.int64)
    inside = (columns >= 0) & (columns < width)
    places = columns + np.repeat(np.arange(len(curves)) * width, [len(curve.x) for curve in curves])  # in all rows
    drawn = np.flatnonzero(inside & np.isfinite(lows) & np.isfinite(highs))
    np.fmin.at(low.reshape(-1), places[drawn], lows[drawn])
    np.fmax.at(high.reshape(-1), places[drawn], highs[drawn])
    here, there = drawn[:-1], drawn[1:]
    here = here[(there == here + 1) & ties[here] & (columns[there] > columns[here])]
    _bridge(((low, lows), (high, highs)), joined, places, here)
    return low, high, joined


def _parts(curve: Curve) -> tuple[Floats, Floats, Floats, NDArray[np.bool_]]:
    ties = np.zeros(len(curve.x), bool)
    ties[:-1] = np.diff(curve.x) <= 1.5 * curve.span if curve.joins is None else curve.joins
    return curve.x, curve.low, curve.high, ties


def _bridge(
    drawn: Sequence[tuple[Floats, Floats]], joined: NDArray[np.bool_], places: NDArray[np.int64], here: NDArray[np.intp]
) -> None:
    """Join the buckets `here`, drawn at their `places`, to their next: columns between them get the straight line's
    value. `drawn` pairs what is drawn with the buckets' values."""
    start, apart = places[here], places[here + 1] - places[here]
    whose = np.repeat(np.arange(len(here)), apart)
    within = np.arange(len(whose)) - np.repeat(np.cumsum(apart) - apart, apart)
    joined.reshape(-1)[start[whose] + within] = True
    between = within > 0
    whose, within = whose[between], within[between]
    place, part, bucket = start[whose] + within, within / apart[whose], here[whose]
    for out, values in drawn:
        out.reshape(-1)[place] = values[bucket] + part * (values[bucket + 1] - values[bucket])


def _between(
    first: NDArray[np.int64], last: NDArray[np.int64], drawn: NDArray[np.bool_], rows: int
) -> NDArray[np.bool_]:
    row = np.arange(rows)[:, None]
    made: NDArray[np.bool_] = (first[:, None] <= row) & (row <= last[:, None]) & drawn[:, None]
    return made


_AT_ONCE = 16  # curves whose dots are worked out together, which bounds the memory that it takes


class Canvas:
    """Dots and who drew them; the last curve drawn gives a cell its colour."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        width, height = frame.dots
        self._dots = np.zeros((height, width), bool)
        self._drawers = [""]  # roles in the order in which they first drew
        self._drawn_by = np.zeros((frame.rows, frame.columns), np.int64)  # of each cell, as a place in `_drawers`
        self._over: dict[tuple[int, int], tuple[str, str]] = {}

    def stroke(self, *curves: Curve, alone: bool = False) -> None:
        """Draw curves, a later one over those before it: in each dot column from its lowest to its highest value,
        joined to its neighbours. With `alone` they clear the cells that they pass through, so that a line is seen on
        what fills them."""
        under = self._dots
        if alone:
            self._dots = np.zeros_like(under)
        for start in range(0, len(curves), _AT_ONCE):
            self._draw(curves[start : start + _AT_ONCE])
        if alone:
            cells = self._in_cells(self._dots).any(axis=(1, 3))
            passed = np.repeat(np.repeat(cells, DOWN, axis=0), ACROSS, axis=1)
            self._dots |= under & ~passed

    def _draw(self, curves: Sequence[Curve]) -> None:
        low, high, joined = extents(curves, self.frame)
        height, width = self._dots.shape
        if height == 0 or width == 0:
            return
        drawn = np.isfinite(low)
        bottom, top = self._dot_rows(low), self._dot_rows(high)
        # Reach towards the neighbour, so that a steep line has no holes.
        tied = joined[:, :-1] & drawn[:, :-1] & drawn[:, 1:]
        first, last = top.copy(), bottom.copy()
        first[:, 1:] = np.where(tied, np.minimum(top[:, 1:], bottom[:, :-1] + 1), top[:, 1:])
        last[:, 1:] = np.where(tied, np.maximum(bottom[:, 1:], top[:, :-1] - 1), bottom[:, 1:])
        self._dots |= _between(first, last, drawn, height).any(axis=0)
        passed = _between(first // DOWN, last // DOWN, drawn, self.frame.rows)
        passed = np.logical_or.reduce([passed[:, :, at::ACROSS] for at in range(ACROSS)])
        drawers = [self._drawer(curve.role) for curve in curves]
        # The last curve that passes through a cell is the one that drew it.
        newest = np.max(passed * np.arange(1, len(drawers) + 1)[:, None, None], axis=0)
        self._drawn_by = np.where(newest, np.array([0, *drawers])[newest], self._drawn_by)

    def _dot_rows(self, values: Floats) -> NDArray[np.int64]:
        height = self._dots.shape[0]
        y0, y1 = self.frame.y0, self.frame.y1
        across = (y1 - np.where(np.isfinite(values), values, y1)) / (y1 - y0)
        return np.clip(np.floor(across * height), 0, height - 1).astype(np.int64)

    def _in_cells(self, dots: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return dots.reshape(self.frame.rows, DOWN, self.frame.columns, ACROSS)

    def put(self, column: int, row: int, text: str, role: str) -> None:
        """Write text over the dots, one character a cell; what falls outside is dropped."""
        for offset, char in enumerate(text):
            if 0 <= column + offset < self.frame.columns and 0 <= row < self.frame.rows:
                self._over[row, column + offset] = (char, role)

    def under(self, column: int, char: str, role: str) -> None:
        """Draw a vertical of `char` in the cells of a column that nothing else has drawn in."""
        for row in range(self.frame.rows):
            if 0 <= column < self.frame.columns and not self._drawn_by[row, column]:
                self._over.setdefault((row, column), (char, role))

    def is_blank(self, columns: range, row: int) -> bool:
        """Return whether nothing is drawn or written in these cells of a row, all of them within the frame."""
        inside = 0 <= row < self.frame.rows and columns.start >= 0 and columns.stop <= self.frame.columns
        return inside and not any(self._drawn_by[row, column] or (row, column) in self._over for column in columns)

    def lines(self) -> list[Line]:
        """Return what is drawn, row by row."""
        chars, drawers = self._chars(), self._drawn_by.copy()
        for (row, column), (char, role) in self._over.items():
            chars[row, column], drawers[row, column] = ord(char), self._drawer(role)
        return self._joined(chars, drawers) if chars.size else [()] * len(chars)

    def _joined(self, chars: NDArray[np.uint32], drawers: NDArray[np.int64]) -> list[Line]:
        text, columns = chars.tobytes().decode("utf-32-le"), chars.shape[1]
        begins = np.ones(drawers.shape, bool)
        begins[:, 1:] = drawers[:, 1:] != drawers[:, :-1]
        starts = np.flatnonzero(begins)
        pieces = [
            Piece(text[start:end], self._drawers[drawer])
            for start, end, drawer in zip(
                starts.tolist(), [*starts[1:].tolist(), len(text)], drawers.reshape(-1)[starts].tolist(), strict=True
            )
        ]
        rows = np.searchsorted(starts, np.arange(0, len(text) + 1, columns)).tolist()
        return [tuple(pieces[first:last]) for first, last in pairwise(rows)]

    def _drawer(self, role: str) -> int:
        if role not in self._drawers:
            self._drawers.append(role)
        return self._drawers.index(role)

    def _chars(self) -> NDArray[np.uint32]:
        codes = np.einsum("rdca,da->rc", self._in_cells(self._dots).astype(np.int64), _BITS)
        made: NDArray[np.uint32] = _BRAILLE[codes]
        return made
