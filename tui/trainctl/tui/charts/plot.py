"""A chart with a scale, an axis, smoothed lines and a crosshair as plain lines of text: a pure function of a `Plot`."""

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trainctl.tui.charts.axis import Axis, Scale, text, ticks
from trainctl.tui.charts.canvas import Canvas, Curve, Frame
from trainctl.tui.charts.marks import Mark, draw_marks, mark_columns, name_changes, overrun, text_columns
from trainctl.tui.charts.traces import Shape, Trace, shape
from trainctl.tui.state.run_events import Change
from trainctl.tui.text.styled_line import Line, Piece, fit, from_cells

LEAST_COLUMNS = 24
_LETTER_CELLS = 12


@dataclass(frozen=True)
class Plot:
    """A chart: traces over the steps `first` to `last` of `axis`.

    `crosshair` is a step. Values above `most_times` their median run out at the top, the highest with its number. A
    `small` one stands among other things: its x axis says the first, the middle and the last step.
    """

    title: str
    traces: tuple[Trace, ...]
    first: float
    last: float
    axis: Axis = field(default_factory=Axis)
    scale: Scale = field(default_factory=Scale)
    half_life_steps: float = 0.0
    marks: tuple[Mark | Change, ...] = ()
    crosshair: float | None = None
    focused: bool = False
    with_axis: bool = True  # a row for x, which the lowest of several above each other has for all
    zone: datetime.tzinfo | None = None
    empty_text: str = "no values in view"
    least_span: float = 0.02
    most_times: float = math.inf
    small: bool = False

    @property
    def edges(self) -> tuple[float, float]:
        """Return x at the left and at the right edge."""
        return float(self.axis.to_x(self.first)), float(self.axis.to_x(self.last + 1))


def panel(
    title: str,
    traces: tuple[Trace, ...],
    first: int,
    last: int,
    marks: tuple[Mark | Change, ...] = (),
    *,
    empty_text: str = "no step yet",
    least_span: float = 0.02,
    most_times: float = math.inf,
) -> Plot:
    """Return a small chart over the steps `first` to `last`."""
    return Plot(
        title,
        traces,
        first,
        last,
        marks=marks,
        empty_text=empty_text,
        least_span=least_span,
        most_times=most_times,
        small=True,
    )


@dataclass(frozen=True)
class Margins:
    """Cells left of the dots, for y labels, and right of them, for names."""

    left: int
    right: int


@dataclass(frozen=True)
class Prepared:
    """A plot's shapes, the heights at its bottom and top (None: nothing to draw), and its y labels by height."""

    shapes: tuple[Shape, ...]
    span: tuple[float, float] | None
    labels: dict[float, str]


def prepare(plot: Plot, rows: int) -> Prepared:
    """Return what a drawing in `rows` rows, title not counted, begins with."""
    x0, x1 = plot.edges
    shapes = tuple(shape(trace, x0, x1, plot.scale, plot.half_life_steps, clip=not plot.small) for trace in plot.traces)
    span = _span(plot, shapes) if plot.axis.known and x1 > x0 else None
    labels = plot.scale.ticks(*span, plot_rows(plot, rows)) if span is not None else {}
    return Prepared(shapes, span, labels)


def plot_rows(plot: Plot, rows: int) -> int:
    """Return rows of dots: all but that of the x axis, which low charts go without."""
    return rows - 1 if plot.with_axis and rows >= (6 if plot.small else 5) else rows


def plot_margins(plot: Plot, made: Prepared, columns: int) -> Margins:
    """Return the cells it needs beside its dots; charts above each other take the widest of each."""
    left = max((len(words) for words in made.labels.values()), default=4) + 1
    names = [len(_name(trace, plot)) for trace in plot.traces]
    right = max((size + 1 for size in names if size), default=0)
    return Margins(left, right if columns - left - right >= (12 if plot.small else LEAST_COLUMNS) else 0)


def _span(plot: Plot, shapes: Sequence[Shape]) -> tuple[float, float] | None:
    bounds = [values for item in shapes for values in item.bounds()]
    heights = np.concatenate(bounds) if bounds else np.empty(0)
    if not len(heights):
        return None
    values = 10.0**heights if plot.scale.log else heights
    if math.isfinite(plot.most_times) and not plot.scale.log:
        values = values[values <= max(plot.most_times * float(np.median(values)), float(values.min()))]
    return plot.scale.range_of(float(values.min()), float(values.max()), plot.least_span)


def draw_plot(
    plot: Plot, columns: int, rows: int, made: Prepared | None = None, room: Margins | None = None
) -> tuple[list[Line], list[tuple[int, str, str]]]:
    """Return the chart's rows, and the labels its title rule carries: (cell, text, role)."""
    made = made or prepare(plot, rows)
    room = room or plot_margins(plot, made, columns)
    role = "accent" if plot.focused else "title"
    lead = "▸" if plot.focused else "─"
    title = [(0, f"{lead} {plot.title} ", role)]
    inner = columns - room.left - room.right
    if rows < 1 or inner < 4 or made.span is None:
        words = Piece(f"  {plot.empty_text}", "dim")
        return [fit((words,) if row == rows // 2 else (), columns) for row in range(max(rows, 0))], title
    x0, x1 = plot.edges
    frame = Frame(x0, x1, *made.span, inner, plot_rows(plot, rows))
    canvas = Canvas(frame)
    _strokes(canvas, plot, made.shapes)
    _points(canvas, plot, made.shapes)
    if _lettered(plot):
        _letters(canvas, plot, made.shapes)
    if plot.crosshair is not None and plot.first <= plot.crosshair < plot.last + 1:
        canvas.under(frame.column_of(float(plot.axis.to_x(plot.crosshair))), "│", "strong")
    titled = len(title[0][1]) - room.left
    numbers, changes = draw_marks(canvas, plot.marks, titled, lambda step: float(plot.axis.to_x(step)))
    highs = [(item.x, item.high) for item in made.shapes]
    if plot.small:
        overrun(canvas, highs, mark_columns(plot.marks, frame))
    names = name_changes(canvas, changes, titled, text_columns(numbers))
    if not plot.small:
        overrun(canvas, highs)
    lines = _assemble(canvas, plot, made, room)
    if plot_rows(plot, rows) < rows:
        lines.append(_steps_line(frame, room, columns) if plot.small else _axis_line(plot, frame, room, columns))
    title += [(room.left + column, words, "label") for column, words in names]
    return lines, title + [(room.left + column, words, "mark") for column, words in numbers]


def _strokes(canvas: Canvas, plot: Plot, shapes: Sequence[Shape]) -> None:
    """Draw raw lines first, as bands of their extremes, then what runs through them: the means of a line that is by
    itself or has a band, or the smoothed lines."""
    single = sum(not trace.points for trace in plot.traces) == 1
    behind: list[Curve] = []
    over: list[Curve] = []
    for trace, item in zip(plot.traces, shapes, strict=True):
        if trace.points:
            continue
        smooth = len(item.smoothed) > 0
        split = smooth or ((single or trace.band != "") and bool(np.any(item.high > item.low)))
        role = (trace.band or ("band" if single else "dim")) if split else trace.role
        behind.append(Curve(item.x, item.low, item.high, 0.0, role, item.joins))
        middle = item.smoothed if smooth else item.mean
        if split:
            (behind if plot.small else over).append(Curve(item.x, middle, middle, 0.0, trace.role, item.joins))
    canvas.stroke(*behind)
    for curve in over:
        canvas.stroke(curve, alone=True)


def _points(canvas: Canvas, plot: Plot, shapes: Sequence[Shape]) -> None:
    """Draw single values; what isn't finite at the top, and at the bottom what a logarithm has no place for."""
    frame = canvas.frame
    for trace, item in zip(plot.traces, shapes, strict=True):
        if trace.points:
            values = item.last if plot.small else item.mean
            for x, height in zip(item.x.tolist(), values.tolist(), strict=True):
                if math.isfinite(height):
                    canvas.put(frame.column_of(x), frame.row_of(height), "◆", trace.role)
        for x in item.undrawn.tolist():
            canvas.put(frame.column_of(x), frame.rows - 1, "↓", "warning")
        for x in item.broken.tolist():
            canvas.put(frame.column_of(x), 0, "✕", "bad")


def _letters(canvas: Canvas, plot: Plot, shapes: Sequence[Shape]) -> None:
    frame = canvas.frame
    for index, (trace, item) in enumerate(zip(plot.traces, shapes, strict=True)):
        due = 2 + index * _LETTER_CELLS // len(plot.traces)
        heights = item.smoothed if len(item.smoothed) else item.mean
        for x, height in zip(item.x.tolist(), heights.tolist(), strict=True):
            column = frame.column_of(x)
            if trace.letter and not trace.points and due <= column < frame.columns and math.isfinite(height):
                canvas.put(column, frame.row_of(height), trace.letter, trace.role)
                due = column + _LETTER_CELLS


def _lettered(plot: Plot) -> bool:
    return sum(trace.letter != "" for trace in plot.traces) > 1


def _name(trace: Trace, plot: Plot) -> str:
    return f"{trace.letter} {trace.label}" if trace.letter and trace.label and _lettered(plot) else trace.label


def _ends(plot: Plot, made: Prepared, frame: Frame) -> dict[int, tuple[str, str]]:
    """Return each line's name and role by the row of its last value in view, or the nearest free one; what finds none
    is left out."""
    wanted = []
    for trace, item in zip(plot.traces, made.shapes, strict=True):
        heights = item.last if plot.small else item.smoothed if len(item.smoothed) else item.mean
        found = np.flatnonzero(np.isfinite(heights))
        if trace.label and len(found):
            wanted.append((float(heights[found[-1]]), _name(trace, plot), trace.role))
    placed: dict[int, tuple[str, str]] = {}
    for height, name, role in sorted(wanted, key=lambda item: -item[0]):
        home = frame.row_of(height)
        free = sorted((abs(row - home), row) for row in range(frame.rows) if row not in placed)
        if free:
            placed[free[0][1]] = (name, role)
    return placed


def _assemble(canvas: Canvas, plot: Plot, made: Prepared, room: Margins) -> list[Line]:
    frame = canvas.frame
    labels = {frame.row_of(height): words for height, words in made.labels.items()}
    ends = _ends(plot, made, frame) if room.right else {}
    lines = []
    for row, drawn in enumerate(canvas.lines()):
        name, role = ends.get(row, ("", "text"))
        tail = (Piece(f" {name}".ljust(room.right)[: room.right], role),) if room.right else ()
        lead = Piece(labels.get(row, "").rjust(room.left - 1) + " ", "axis")
        lines.append((lead, *drawn, *tail))
    return lines


def _axis_line(plot: Plot, frame: Frame, room: Margins, columns: int) -> Line:
    """Return round values under the dots, each centred below its column; the crosshair's own value goes before them."""
    cells: list[tuple[str, str]] = [(" ", "axis")] * columns
    marks = ticks(plot.axis, frame.x0, frame.x1, frame.columns, plot.zone)
    wanted = [(frame.column_of(x), words, "axis") for x, words in marks]
    if plot.crosshair is not None and plot.first <= plot.crosshair < plot.last + 1:
        x = float(plot.axis.to_x(plot.crosshair))
        wanted.insert(0, (frame.column_of(x), text(plot.axis, x, frame.x1 - frame.x0, plot.zone), "strong"))
    taken: set[int] = set()
    for column, words, role in wanted:
        start = min(max(room.left + column - len(words) // 2, 0), columns - len(words))
        over = range(start - 1, start + len(words) + 1)
        if start >= 0 and not taken & set(over):
            taken |= set(over)
            cells[start : start + len(words)] = [(char, role) for char in words]
    return from_cells(cells)


def _steps_line(frame: Frame, room: Margins, columns: int) -> Line:
    first, last = int(frame.x0), int(frame.x1) - 1
    row = [" "] * columns
    right, middle = f"{last:,}", f"{(first + last) // 2:,}"
    texts = [(room.left, f"{first:,}"), (room.left + frame.columns - len(right), right)]
    if frame.columns >= 3 * len(right) + 8:
        texts.insert(1, (room.left + frame.columns // 2 - len(middle) // 2, middle))
    for start, words in texts:
        row[start : start + len(words)] = words
    return (Piece("".join(row)[:columns], "axis"),)
