"""Verticals in a chart: numbered where an event took effect, named where a generation of other ranks begins."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from trainctl.tui.charts.canvas import Canvas, Frame
from trainctl.tui.state.membership_changes import Change
from trainctl.tui.text.glyphs import Glyphs

Placed = list[tuple[int, str]]
"""(column, text) for the title rule, from the chart's first column."""


@dataclass(frozen=True)
class Mark:
    """An event at a step, shown as a vertical with its number above the chart."""

    step: int
    number: str


def draw(
    canvas: Canvas, marks: Sequence[Mark | Change], glyphs: Glyphs, titled: int, x_of: Callable[[int], float] = float
) -> tuple[Placed, Mapping[int, str]]:
    """Draws the verticals, a step's at `x_of` it. The numbers for the title rule, and the generations by column.

    The first `titled` columns lie under the title's words: there a number stands at its vertical's top. Where two would
    touch the newer one shows.
    """
    marked = _at_columns(canvas, {x_of(mark.step): mark.number for mark in marks if isinstance(mark, Mark)})
    changes = _at_columns(canvas, {x_of(mark.step): mark.generation for mark in marks if isinstance(mark, Change)})
    for column in marked:
        canvas.under(column, glyphs.mark, "mark")
    for column in changes:
        canvas.under(column, glyphs.change, "label")
    numbers = _apart(marked, canvas.frame.columns)
    for column, number in numbers:
        if column < titled:
            canvas.put(column, 0, number, "mark")
    return [(column, number) for column, number in numbers if column >= titled], changes


def _apart(numbers: Mapping[int, str], columns: int) -> Placed:
    """Where each number begins, ascending: over its vertical, or as far before it as the last column wants. Of those
    that would touch, the newest stay."""
    made: Placed = []
    for column, number in sorted(numbers.items(), reverse=True):
        start = max(min(column, columns - len(number)), 0)
        if not made or start + len(number) < made[-1][0]:
            made.append((start, number))
    return made[::-1]


def taken(marks: Sequence[Mark | Change], frame: Frame) -> set[int]:
    """The columns of the verticals, and of the numbers at their tops."""
    sizes = [(frame.column_of(mark.step), len(mark.number) if isinstance(mark, Mark) else 1) for mark in marks]
    return {column + offset for column, size in sizes for offset in range(size)}


def beyond(glyphs: Glyphs) -> str:
    """Before the number of a value above the chart, so that it isn't taken for a mark's."""
    return "^" if glyphs.ascii_only else glyphs.up


def cells(placed: Placed) -> set[int]:
    """The columns that they take."""
    return {column + offset for column, text in placed for offset in range(len(text))}


def _at_columns(canvas: Canvas, texts: Mapping[float, str]) -> dict[int, str]:
    """By column instead of by x, what lies outside left out."""
    at = {canvas.frame.column_of(x): text for x, text in texts.items()}
    return {column: text for column, text in at.items() if 0 <= column < canvas.frame.columns}


def name(canvas: Canvas, changes: Mapping[int, str], titled: int, numbered: Collection[int]) -> Placed:
    """The generations for the title rule, the newest first, as far as there is room between the numbers there.

    Under the title's words one stands in the chart's first row, if nothing is drawn there.
    """
    taken, made = set(numbered), []
    for column, text in sorted(changes.items(), reverse=True):
        start = _room(column, len(text), taken, range(max(titled, 0), canvas.frame.columns), column in numbered)
        if start is not None:
            taken |= set(range(start, start + len(text)))
            made.append((start, text))
        elif column < titled and canvas.is_blank(range(column + 1, column + 2 + len(text)), 0):
            canvas.put(column + 1, 0, text, "label")
    return made


def _room(column: int, size: int, taken: Collection[int], within: range, beside: bool) -> int | None:
    """Where `size` cells begin that are over `column`, or else `beside` it, and neither hold nor touch one taken."""
    starts = (column + 2, column - size - 1) if beside else range(column, column - size, -1)
    for start in starts:
        inside = start in within and start + size - 1 in within
        if inside and not any(cell in taken for cell in range(start - 1, start + size + 1)):
            return start
    return None
