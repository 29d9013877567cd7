"""A chart with a scale, an axis, smoothed lines and a crosshair as plain lines of text: a pure function of a `Plot`."""

import datetime
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trainctl.tui.charts.axis import Axis, Scale, text, ticks
from trainctl.tui.charts.canvas import Canvas, Curve, Floats, Frame
from trainctl.tui.charts.marks import Mark, Placed, draw_marks, mark_columns, name_changes, overrun, text_columns
from trainctl.tui.charts.traces import Shape, Trace, shape
from trainctl.tui.state.run_events import Change
from trainctl.tui.text.styled_line import Line, Piece, fit, from_cells

MIN_COLUMNS = 24
_MIN_PANEL_COLUMNS = 12
_LETTER_CELLS = 12


@dataclass(frozen=True)
class Plot:
    """A chart: traces over the steps `first` to `last` of `axis`.

    `crosshair` is a step. Values above `max_times` their median run out at the top, the highest with its number.
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
    empty_text: str = "no step yet"
    min_span: float = 0.02
    max_times: float = math.inf

    @property
    def edges(self) -> tuple[float, float]:
        """Return x at the left and at the right edge."""
        return float(self.axis.to_x(self.first)), float(self.axis.to_x(self.last + 1))


@dataclass(frozen=True)
class Margins:
    """Cells left of the dots, for y labels, and right of them, for names."""

    left: int
    right: int


@dataclass(frozen=True)
class Prepared:
    """A plot's shapes, the heights at its bottom and top (None: nothing to draw), its y labels by height, and its rows
    of dots."""

    shapes: tuple[Shape, ...]
    span: tuple[float, float] | None
    labels: dict[float, str]
    rows: int

    @property
    def highs(self) -> list[tuple[Floats, Floats]]:
        """Return each line's x and highest values."""
        return [(item.x, item.high) for item in self.shapes]


def prepare(plot: Plot, rows: int) -> Prepared:
    """Return what a drawing in `rows` rows, title not counted, begins with. Low charts go without the x axis' row."""
    return _prepared(plot, rows - 1 if plot.with_axis and rows >= 5 else rows, clip=True)


def _prepared(plot: Plot, rows: int, *, clip: bool) -> Prepared:
    x0, x1 = plot.edges
    shapes = tuple(shape(trace, x0, x1, plot.scale, plot.half_life_steps, clip=clip) for trace in plot.traces)
    span = _span(plot, shapes) if plot.axis.known and x1 > x0 else None
    return Prepared(shapes, span, plot.scale.ticks(*span, rows) if span is not None else {}, rows)


def plot_margins(plot: Plot, made: Prepared, columns: int, min_columns: int = MIN_COLUMNS) -> Margins:
    """Return the cells it needs beside its dots; charts above each other take the widest of each. Names that leave less
    than `min_columns` for the dots aren't shown."""
    left = max((len(words) for words in made.labels.values()), default=4) + 1
    names = [len(_name(trace, plot)) for trace in plot.traces]
    right = max((size + 1 for size in names if size), default=0)
    return Margins(left, right if columns - left - right >= min_columns else 0)


def _span(plot: Plot, shapes: Sequence[Shape]) -> tuple[float, float] | None:
    bounds = [values for item in shapes for values in item.bounds()]
    heights = np.concatenate(bounds) if bounds else np.empty(0)
    if not len(heights):
        return None
    values = 10.0**heights if plot.scale.log else heights
    if math.isfinite(plot.max_times) and not plot.scale.log:
        values = values[values <= max(plot.max_times * float(np.median(values)), float(values.min()))]
    return plot.scale.range_of(float(values.min()), float(values.max()), plot.min_span)


Block = tuple[list[Line], list[tuple[int, str, str]], int]
"""A chart's rows, the labels that its title rule carries (cell, text, role), and its cells across."""


def draw_plot(plot: Plot, columns: int, rows: int, made: Prepared | None = None, room: Margins | None = None) -> Block:
    """Return a chart with the x axis' values and the crosshair's, and smoothed lines over the raw ones."""
    made = made or prepare(plot, rows)
    room = room or plot_margins(plot, made, columns)
    title = [_title(plot)]
    canvas = _canvas(plot, made, room, columns)
    if canvas is None:
        return _without_values(plot, columns, rows), title, columns
    curves = _curves(plot, made.shapes)
    canvas.stroke(*(band for band, _ in curves))
    for _, middle in curves:
        if middle is not None:
            canvas.stroke(middle, alone=True)
    _points(canvas, plot, made.shapes, [item.mean for item in made.shapes])
    numbers, changes = _overlays(canvas, plot, made, titled=len(title[0][1]) - room.left)
    names = name_changes(canvas, changes, len(title[0][1]) - room.left, text_columns(numbers))
    overrun(canvas, made.highs)
    lines = _assemble(canvas, plot, made, room, [_middle(item) for item in made.shapes])
    if made.rows < rows:
        lines.append(_axis_line(plot, canvas.frame, room, columns))
    return lines, title + _rule_labels(room, names, numbers), columns


def draw_panel(plot: Plot, columns: int, rows: int) -> Block:
    """Return a small chart among other things: its x axis says the first, the middle and the last step, and points and
    names stand at each line's last value."""
    made = _prepared(plot, rows - 1 if rows >= 6 else rows, clip=False)
    room = plot_margins(plot, made, columns, _MIN_PANEL_COLUMNS)
    title = [_title(plot)]
    canvas = _canvas(plot, made, room, columns)
    if canvas is None:
        return _without_values(plot, columns, rows), title, columns
    canvas.stroke(*(curve for pair in _curves(plot, made.shapes) for curve in pair if curve is not None))
    last = [item.last for item in made.shapes]
    _points(canvas, plot, made.shapes, last)
    numbers, changes = _overlays(canvas, plot, made, titled=len(title[0][1]) - room.left)
    overrun(canvas, made.highs, mark_columns(plot.marks, canvas.frame))
    names = name_changes(canvas, changes, len(title[0][1]) - room.left, text_columns(numbers))
    lines = _assemble(canvas, plot, made, room, last)
    if made.rows < rows:
        lines.append(_steps_line(canvas.frame, room, columns))
    return lines, title + _rule_labels(room, names, numbers), columns


def _title(plot: Plot) -> tuple[int, str, str]:
    return (0, f"▸ {plot.title} ", "accent") if plot.focused else (0, f"─ {plot.title} ", "title")


def _canvas(plot: Plot, made: Prepared, room: Margins, columns: int) -> Canvas | None:
    """Return an empty canvas; None without room for it, or without a value."""
    inner = columns - room.left - room.right
    if made.rows < 1 or inner < 4 or made.span is None:
        return None
    return Canvas(Frame(*plot.edges, *made.span, inner, made.rows))


def _without_values(plot: Plot, columns: int, rows: int) -> list[Line]:
    words = Piece(f"  {plot.empty_text}", "dim")
    return [fit((words,) if row == rows // 2 else (), columns) for row in range(max(rows, 0))]


def _rule_labels(room: Margins, names: Placed, numbers: Placed) -> list[tuple[int, str, str]]:
    placed = [(column, words, "label") for column, words in names] + [
        (column, text, "mark") for column, text in numbers
    ]
    return [(room.left + column, words, role) for column, words, role in placed]


def _curves(plot: Plot, shapes: Sequence[Shape]) -> list[tuple[Curve, Curve | None]]:
    """Return each raw line as the band of its extremes, with what runs through it: the means of a line that is by
    itself or has a band, or the smoothed line."""
    single = sum(not trace.points for trace in plot.traces) == 1
    curves: list[tuple[Curve, Curve | None]] = []
    for trace, item in zip(plot.traces, shapes, strict=True):
        if trace.points:
            continue
        smooth = len(item.smoothed) > 0
        split = smooth or ((single or trace.band != "") and bool(np.any(item.high > item.low)))
        role = (trace.band or ("band" if single else "dim")) if split else trace.role
        middle = Curve(item.x, _middle(item), _middle(item), 0.0, trace.role, item.joins) if split else None
        curves.append((Curve(item.x, item.low, item.high, 0.0, role, item.joins), middle))
    return curves


def _middle(item: Shape) -> Floats:
    return item.smoothed if len(item.smoothed) else item.mean


def _points(canvas: Canvas, plot: Plot, shapes: Sequence[Shape], heights: Sequence[Floats]) -> None:
    """Draw single values; what isn't finite at the top, and at the bottom what a logarithm has no place for."""
    frame = canvas.frame
    for trace, item, values in zip(plot.traces, shapes, heights, strict=True):
        if trace.points:
            for x, height in zip(item.x.tolist(), values.tolist(), strict=True):
                if math.isfinite(height):
                    canvas.put(frame.column_of(x), frame.row_of(height), "◆", trace.role)
        for x in item.undrawn.tolist():
            canvas.put(frame.column_of(x), frame.rows - 1, "↓", "warning")
        for x in item.broken.tolist():
            canvas.put(frame.column_of(x), 0, "✕", "bad")


def _overlays(canvas: Canvas, plot: Plot, made: Prepared, titled: int) -> tuple[Placed, Mapping[int, str]]:
    """Draw letters, crosshair and marks over the lines. Return the marks' numbers, and the generations by column."""
    if _lettered(plot):
        _letters(canvas, plot, made.shapes)
    if plot.crosshair is not None and plot.first <= plot.crosshair < plot.last + 1:
        canvas.under(canvas.frame.column_of(float(plot.axis.to_x(plot.crosshair))), "│", "strong")
    return draw_marks(canvas, plot.marks, titled, lambda step: float(plot.axis.to_x(step)))


def _letters(canvas: Canvas, plot: Plot, shapes: Sequence[Shape]) -> None:
    frame = canvas.frame
    for index, (trace, item) in enumerate(zip(plot.traces, shapes, strict=True)):
        due = 2 + index * _LETTER_CELLS // len(plot.traces)
        for x, height in zip(item.x.tolist(), _middle(item).tolist(), strict=True):
            column = frame.column_of(x)
            if trace.letter and not trace.points and due <= column < frame.columns and math.isfinite(height):
                canvas.put(column, frame.row_of(height), trace.letter, trace.role)
                due = column + _LETTER_CELLS


def _lettered(plot: Plot) -> bool:
    return sum(trace.letter != "" for trace in plot.traces) > 1


def _name(trace: Trace, plot: Plot) -> str:
    return f"{trace.letter} {trace.label}" if trace.letter and trace.label and _lettered(plot) else trace.label


def _ends(plot: Plot, heights: Sequence[Floats], frame: Frame) -> dict[int, tuple[str, str]]:
    """Return each line's name and role by the row of its last value in view, or the nearest free one; what finds none
    is left out."""
    wanted = []
    for trace, values in zip(plot.traces, heights, strict=True):
        finite = np.flatnonzero(np.isfinite(values))
        if trace.label and len(finite):
            wanted.append((float(values[finite[-1]]), _name(trace, plot), trace.role))
    placed: dict[int, tuple[str, str]] = {}
    for height, name, role in sorted(wanted, key=lambda item: -item[0]):
        home = frame.row_of(height)
        free = sorted((abs(row - home), row) for row in range(frame.rows) if row not in placed)
        if free:
            placed[free[0][1]] = (name, role)
    return placed


def _assemble(canvas: Canvas, plot: Plot, made: Prepared, room: Margins, heights: Sequence[Floats]) -> list[Line]:
    frame = canvas.frame
    labels = {frame.row_of(height): words for height, words in made.labels.items()}
    ends = _ends(plot, heights, frame) if room.right else {}
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
