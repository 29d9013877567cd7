"""A chart with what makes it readable: y labels, a row of x labels, names at the lines' ends, numbered event marks."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainctl.tui.charts import marks as mk
from trainctl.tui.charts.canvas import Canvas, Curve, Frame
from trainctl.tui.state.membership_changes import Change
from trainctl.tui.state.series import Window
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.glyphs import Glyphs


@dataclass(frozen=True)
class Track:
    """A window to draw, the name at its line's end ("" for none), its role, and a letter for where colours don't show.

    `points` draws single values instead of a line; with `band` the extremes take that role, and the mean runs in `role`
    through them.
    """

    window: Window
    label: str
    role: str
    points: bool = False
    band: str = ""
    letter: str = ""


@dataclass(frozen=True)
class Panel:
    """One chart: what it shows, over which steps, in which room (`columns` x `rows`, title not counted)."""

    title: str
    tracks: tuple[Track, ...]
    first_step: int
    last_step: int
    marks: tuple[mk.Mark | Change, ...] = ()
    empty_text: str = "no step yet"
    least_span: float = 0.02  # of the values' size: noise smaller than this stays a flat line
    most_times: float = math.inf  # the median: what is above that runs out at the top, with its number there


def window_end(newest: int, total: int) -> int:
    """Where a chart's x axis ends: it fills up, then jumps on by an eighth to a quarter, so it seldom moves, and four
    fifths or more are filled from the second step on.

    At most `total` steps when that is known, 2 at least.
    """
    size = 2
    while size < newest:
        size *= 2
    end = next(value for value in (size * part // 8 for part in (5, 6, 7, 8)) if value >= max(newest, 2))
    return min(end, total) if total >= max(newest, 2) else end


def page(newest: int, steps: int) -> tuple[int, int]:
    """First and last step of a view of about `steps` steps that moves on by quarters."""
    quarter = max(steps // 4, 1)
    last = max(-(-newest // quarter), 4) * quarter
    return last - 4 * quarter + 1, last


def draw(panel: Panel, columns: int, rows: int, glyphs: Glyphs) -> tuple[list[ln.Line], list[tuple[int, str, str]]]:
    """The chart's rows, and the labels its title rule carries: (cell, text, role)."""
    title = [(0, f"{glyphs.horizontal} {panel.title} ", "title")]
    if rows < 1 or columns < 12:
        return [ln.fit(ln.EMPTY, columns) for _ in range(max(rows, 0))], title
    spread = _value_range(panel)
    if spread is None:
        text = ln.Piece(f"  {panel.empty_text}", "dim")
        return [ln.fit((text,) if row == rows // 2 else ln.EMPTY, columns) for row in range(rows)], title
    plot_rows = rows - 1 if rows >= 6 else rows
    ticks, texts = tick_labels(*spread, plot_rows)
    gutter = max(len(text) for text in texts.values()) + 1
    letters = glyphs.letters and sum(bool(track.letter) for track in panel.tracks) > 1
    tracks = [_lettered(track) for track in panel.tracks] if letters else panel.tracks
    end = max((len(track.label) + 1 for track in tracks if track.label), default=0)
    end = end if columns - gutter - end >= 12 else 0
    frame = Frame(panel.first_step, panel.last_step + 1, *spread, columns - gutter - end, plot_rows, glyphs.ascii_only)
    canvas = Canvas(frame)
    _draw_tracks(canvas, tracks, glyphs)
    if letters:
        _draw_letters(canvas, tracks)
    titled = len(title[0][1]) - gutter
    numbers, changes = mk.draw(canvas, panel.marks, glyphs, titled)
    _draw_overruns(canvas, tracks, mk.taken(panel.marks, frame), glyphs)
    names = mk.name(canvas, changes, titled, mk.cells(numbers))
    labels = end_labels(tracks, frame, glyphs) if end else {}
    made = _assemble(canvas.lines(), {frame.row_of(tick): texts[tick] for tick in ticks}, gutter, labels, end)
    if plot_rows < rows:
        made.append(_x_axis(frame, gutter, columns, glyphs))
    title += [(gutter + column, text, "label") for column, text in names]
    return made, title + [(gutter + column, text, "mark") for column, text in numbers]


def _value_range(panel: Panel) -> tuple[float, float] | None:
    lows, highs = [], []
    for track in panel.tracks:
        shown = (track.window.first <= panel.last_step) & (
            track.window.first + track.window.bucket_steps > panel.first_step
        )
        lows.append(track.window.minimum[shown])
        highs.append(track.window.maximum[shown])
    values = np.concatenate(lows + highs) if lows else np.empty(0)
    values = values[np.isfinite(values)]
    if len(values) and math.isfinite(panel.most_times):
        values = values[values <= max(panel.most_times * float(np.median(values)), float(values.min()))]
    return widen(float(values.min()), float(values.max()), panel.least_span) if len(values) else None


def widen(low: float, high: float, least_span: float = 0.02) -> tuple[float, float]:
    """A range with a little air, at least `least_span` of its values' size tall; around all zeros it is 1 tall."""
    size = high - low
    floor = least_span * max(abs(low), abs(high))
    if size < floor or size == 0:
        middle, half = (low + high) / 2, floor / 2 or 0.5
        return _snapped(middle - half, middle + half)
    return _snapped(low - 0.04 * size, high + 0.04 * size)


def _snapped(low: float, high: float) -> tuple[float, float]:
    """Outward to multiples of about a sixteenth of the range, so that a new extreme seldom moves every dot."""
    unit = 2.0 ** math.floor(math.log2((high - low) / 12))
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit


_FINEST = 1e-290
"""Steps between ticks below this are lost in what a float can tell apart."""


def tick_labels(low: float, high: float, rows: int) -> tuple[list[float], dict[float, str]]:
    """Round values within low..high, about one per two rows and at least one, with texts just precise enough."""
    wanted = max(2, min(8, rows // 2))
    rough = (high - low) / wanted
    if rough < _FINEST:
        middle = (low + high) / 2
        return [middle], {middle: f"{middle:.3g}"}
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * part for part in (1, 2, 2.5, 5, 10) if scale * part >= rough * 0.999)
    ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)] or [(low + high) / 2]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**digits - round(step * 10**digits)) > 1e-6:
        digits += 1
    if digits > 4 or max(abs(tick) for tick in ticks) >= 1e5:
        return ticks, {tick: f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e") for tick in ticks}
    return ticks, {tick: f"{tick:.{digits}f}" for tick in ticks}


def _draw_tracks(canvas: Canvas, tracks: Sequence[Track], glyphs: Glyphs) -> None:
    canvas.stroke(*(curve for track in tracks if not track.points for curve in _curves(track)))
    for track in tracks:
        if track.points:
            for step, value in zip(track.window.first.tolist(), track.window.last.tolist(), strict=True):
                if math.isfinite(value):
                    canvas.put(canvas.frame.column_of(step), canvas.frame.row_of(value), glyphs.point, track.role)
        for step in track.window.first[track.window.broken > 0].tolist():
            canvas.put(canvas.frame.column_of(step), 0, glyphs.nonfinite, "bad")


def _curves(track: Track) -> list[Curve]:
    """The extremes, and with a band the mean over them."""
    window = track.window
    x = window.first.astype(np.float64)
    made = [Curve(x, window.minimum, window.maximum, window.bucket_steps, track.band or track.role)]
    return [*made, Curve(x, window.mean, window.mean, window.bucket_steps, track.role)] if track.band else made


def _lettered(track: Track) -> Track:
    return replace(track, label=f"{track.letter} {track.label}") if track.letter and track.label else track


_LETTER_CELLS = 12
"""From one letter to the next on a line; the lines' letters stand apart from each other."""


def _draw_letters(canvas: Canvas, tracks: Sequence[Track]) -> None:
    frame = canvas.frame
    for index, track in enumerate(tracks):
        due = 2 + index * _LETTER_CELLS // max(len(tracks), 1)
        for step, value in zip(track.window.first.tolist(), track.window.mean.tolist(), strict=True):
            column = frame.column_of(step)
            if track.letter and due <= column < frame.columns and math.isfinite(value):
                canvas.put(column, frame.row_of(value), track.letter, track.role)
                due = column + _LETTER_CELLS


def _draw_overruns(canvas: Canvas, tracks: Sequence[Track], marked: Collection[int], glyphs: Glyphs) -> None:
    """At the top, after an arrow, the number of the highest value that has no room below it, a blank apart from any
    mark."""
    frame = canvas.frame
    over: dict[int, float] = {}
    for track in tracks:
        above = track.window.maximum > frame.y1
        for step, value in zip(track.window.first[above].tolist(), track.window.maximum[above].tolist(), strict=True):
            column = frame.column_of(step)
            if 0 <= column < frame.columns:
                over[column] = max(over.get(column, value), value)
    if over:
        column, value = max(over.items(), key=lambda item: item[1])
        text = f"{mk.beyond(glyphs)}{value:.3g}"
        start = _free_cells(column, len(text), frame.columns, marked)
        if start is not None:
            canvas.put(start, 0, text, "axis")


def _free_cells(column: int, size: int, columns: int, taken: Collection[int]) -> int | None:
    """Where `size` cells begin nearest to `column`, to its right if they can, that neither hold nor touch one taken."""
    starts = [start for start in range(columns - size + 1) if not start <= column < start + size]
    free = [start for start in starts if not any(start - 1 <= cell <= start + size for cell in taken)]
    apart = {start: start - column - 1 if start > column else column - start - size for start in free}
    return min(free, key=lambda start: (apart[start], -start), default=None)


def end_labels(tracks: Sequence[Track], frame: Frame, glyphs: Glyphs) -> dict[int, tuple[str, str]]:
    """Row -> (name, role): each name at its line's last value, moved to the nearest free row; what finds none is left
    out."""
    placed: dict[int, tuple[str, str]] = {}
    wanted = []
    for track in tracks:
        shown = track.window.first + track.window.bucket_steps > frame.x0
        finite = np.flatnonzero(np.isfinite(track.window.last) & shown)
        if track.label and len(finite):
            wanted.append((float(track.window.last[finite[-1]]), track))
    for value, track in sorted(wanted, key=lambda item: -item[0]):
        home = frame.row_of(value)
        free = sorted((abs(row - home), row) for row in range(frame.rows) if row not in placed)
        if free:
            placed[free[0][1]] = (track.label, track.role)
    return placed


def _assemble(
    rows: list[ln.Line], y_labels: dict[int, str], gutter: int, ends: dict[int, tuple[str, str]], end: int
) -> list[ln.Line]:
    made = []
    for row, drawn in enumerate(rows):
        label = y_labels.get(row, "")
        name, role = ends.get(row, ("", "text"))
        tail = (ln.Piece(f" {name}".ljust(end), role),) if end else ()
        made.append((ln.Piece(label.rjust(gutter - 1) + " ", "axis"), *drawn, *tail))
    return made


def _x_axis(frame: Frame, gutter: int, columns: int, glyphs: Glyphs) -> ln.Line:
    """Steps under the chart: first, middle where there is room, last."""
    first, last = int(frame.x0), int(frame.x1) - 1
    row = [" "] * columns
    texts = [(gutter, f"{first:,}")]
    right = f"{last:,}"
    texts.append((gutter + frame.columns - len(right), right))
    middle = f"{(first + last) // 2:,}"
    if frame.columns >= 3 * len(right) + 8:
        texts.insert(1, (gutter + frame.columns // 2 - len(middle) // 2, middle))
    for start, text in texts:
        row[start : start + len(text)] = text
    return (ln.Piece("".join(row)[:columns], "axis"),)
