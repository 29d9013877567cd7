"""Verticals in a chart: numbered where an event took effect, named where a generation of other ranks begins; and the
number of a value above the chart."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainctl.tui.charts.canvas import Canvas, Floats, Frame
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.state import run_events
from trainctl.tui.state.run_events import Change, changes_of_ranks
from trainctl.tui.state.view_state import ViewState

MAX_MARKS = 9

Placed = list[tuple[int, str]]
"""(column, text) for the title rule, from the chart's first column."""


@dataclass(frozen=True)
class Mark:
    """An event at a step, shown as a vertical with its number above the chart."""

    step: int
    number: str


def numbered(state: ViewState) -> dict[int, str]:
    """Return event id -> number, for the last nine commands that took effect; the charts carry the same numbers. It is
    the id, so that it stays as it is when more commands come, and is the same to everyone."""
    commands = (event for event in state.run_events if event.kind == "command" and _is_marked(event.verb))
    effective = [event.id for event in commands if run_events.took_effect(event)]
    return {event: str(event) for event in effective[-MAX_MARKS:]}


def _is_marked(verb: str | None) -> bool:
    """Return whether a verb's events get a number: those that leave the training alone, as notes do, get none."""
    described = DESCRIPTIONS.get(verb or "")
    return verb is not None and (described is None or described.acts_on in ("active run", "new run"))


def of_run(state: ViewState) -> tuple[Mark | Change, ...]:
    """Return the numbered events as chart marks, and the last generations that were formed of other ranks."""
    numbers = numbered(state)
    numbered_events = (event for event in state.run_events if event.id in numbers)
    commands = (Mark(event.step, numbers[event.id]) for event in numbered_events if event.step is not None)
    return (*commands, *changes_of_ranks(state.run_events)[-MAX_MARKS:])


def draw_marks(
    canvas: Canvas, marks: Sequence[Mark | Change], titled: int, x_of: Callable[[int], float] = float
) -> tuple[Placed, Mapping[int, str]]:
    """Draw the verticals, a step's at `x_of` it. The numbers for the title rule, and the generations by column.

    The first `titled` columns lie under the title's words: there a number stands at its vertical's top. Where two would
    touch the newer one shows.
    """
    marked = _at_columns(canvas, {x_of(mark.step): mark.number for mark in marks if isinstance(mark, Mark)})
    changes = _at_columns(canvas, {x_of(mark.step): mark.generation for mark in marks if isinstance(mark, Change)})
    for column in marked:
        canvas.under(column, "┊", "mark")
    for column in changes:
        canvas.under(column, "╎", "label")
    numbers = _apart(marked, canvas.frame.columns)
    for column, number in numbers:
        if column < titled:
            canvas.put(column, 0, number, "mark")
    return [(column, number) for column, number in numbers if column >= titled], changes


def _apart(numbers: Mapping[int, str], columns: int) -> Placed:
    """Return where each number begins, ascending: over its vertical, or as far before it as the last column wants. Of
    those that would touch, the newest stay."""
    made: Placed = []
    for column, number in sorted(numbers.items(), reverse=True):
        start = max(min(column, columns - len(number)), 0)
        if not made or start + len(number) < made[-1][0]:
            made.append((start, number))
    return made[::-1]


def mark_columns(marks: Sequence[Mark | Change], frame: Frame) -> set[int]:
    """Return the columns of the verticals, and of the numbers at their tops."""
    sizes = [(frame.column_of(mark.step), len(mark.number) if isinstance(mark, Mark) else 1) for mark in marks]
    return {column + offset for column, size in sizes for offset in range(size)}


def text_columns(placed: Placed) -> set[int]:
    """Return the columns that they take."""
    return {column + offset for column, text in placed for offset in range(len(text))}


def _at_columns(canvas: Canvas, texts: Mapping[float, str]) -> dict[int, str]:
    at = {canvas.frame.column_of(x): text for x, text in texts.items()}
    return {column: text for column, text in at.items() if 0 <= column < canvas.frame.columns}


def name_changes(canvas: Canvas, changes: Mapping[int, str], titled: int, numbered: Collection[int]) -> Placed:
    """Return the generations for the title rule, the newest first, as far as there is room between the numbers there.

    Under the title's words one stands in the chart's first row, if nothing is drawn there.
    """
    taken, placed = set(numbered), []
    for column, text in sorted(changes.items(), reverse=True):
        start = _room(column, len(text), taken, range(max(titled, 0), canvas.frame.columns), column in numbered)
        if start is not None:
            taken |= set(range(start, start + len(text)))
            placed.append((start, text))
        elif column < titled and canvas.is_blank(range(column + 1, column + 2 + len(text)), 0):
            canvas.put(column + 1, 0, text, "label")
    return placed


def _room(column: int, size: int, taken: Collection[int], within: range, beside: bool) -> int | None:
    """Return where `size` cells begin that are over `column`, or else `beside` it, and neither hold nor touch one
    taken."""
    starts = (column + 2, column - size - 1) if beside else range(column, column - size, -1)
    for start in starts:
        inside = start in within and start + size - 1 in within
        if inside and not any(cell in taken for cell in range(start - 1, start + size + 1)):
            return start
    return None


def overrun(canvas: Canvas, highs: Sequence[tuple[Floats, Floats]], taken: Collection[int] | None = None) -> None:
    """Write the number of the highest value that has no room at the top, after an arrow so that it isn't taken for a
    mark's; `highs` are lines as arrays of x and of heights.

    It stands beside its column where nothing is drawn; with `taken`, columns, as near as it neither holds nor touches
    one of them, whatever is drawn there.
    """
    frame = canvas.frame
    columns, heights = (np.concatenate([np.empty(0), *arrays]) for arrays in zip(*highs, strict=True))
    over = np.isfinite(heights) & (heights > frame.y1)
    if over.any():
        place = int(np.argmax(np.where(over, heights, -np.inf)))
        text = f"↑{heights[place]:.3g}"
        start = _free_cells(canvas, frame.column_of(float(columns[place])), len(text), taken)
        if start is not None:
            canvas.put(start, 0, text, "axis")


def _free_cells(canvas: Canvas, column: int, size: int, taken: Collection[int] | None) -> int | None:
    if taken is None:
        beside = (start for start in (column + 2, column - 1 - size) if start >= 0)
        return next((start for start in beside if canvas.is_blank(range(start, start + size), 0)), None)
    starts = [start for start in range(canvas.frame.columns - size + 1) if not start <= column < start + size]
    free = [start for start in starts if not any(start - 1 <= cell <= start + size for cell in taken)]
    apart = {start: start - column - 1 if start > column else column - start - size for start in free}
    return min(free, key=lambda start: (apart[start], -start), default=None)
