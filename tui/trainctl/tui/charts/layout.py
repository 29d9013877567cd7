"""Charts that share a screen: side by side under one rule; or above each other with one x axis for all, a readout and
the keys, which is the body of the Charts screen. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainctl.tui.charts import readout
from trainctl.tui.charts.axis import Axis, Kind
from trainctl.tui.charts.plot import Block, Margins, Plot, draw_panel, draw_plot, plot_margins, prepare
from trainctl.tui.charts.viewport import ChartView, Extent
from trainctl.tui.text.styled_line import Line, Piece, fit, groups, rule

MIN_CHART_ROWS = 8
"""Rows of a chart with its rule and its x axis; below that fewer charts are drawn."""
READOUT_ROWS = 3


@dataclass(frozen=True)
class Place:
    """The place of a chart's dots: rows from `first_row` (its rule) up to `end_row`, columns from `left`, `columns`
    wide, and the chart's place in the view."""

    chart: int
    first_row: int
    end_row: int
    left: int
    columns: int


@dataclass(frozen=True)
class Drawn:
    """The lines, and where the charts are in them."""

    lines: list[Line]
    places: tuple[Place, ...]

    @property
    def columns(self) -> int:
        """Return the cells across a chart's dots; all charts have the same."""
        return self.places[0].columns if self.places else 0


def window_of_charts(view: ChartView, rows: int) -> range:
    """Return which of the charts are drawn in `rows` rows: as many as fit, the one in focus always among them."""
    if view.alone:
        return range(view.focus, view.focus + 1)
    count = max(min(len(view.charts), rows // MIN_CHART_ROWS), 1)
    start = min(max(view.focus - count + 1, 0), len(view.charts) - count)
    return range(start, start + count)


def draw(
    shown: Sequence[tuple[int, Plot]],
    view: ChartView,
    place: Extent,
    axes: Mapping[Kind, Axis],
    notes: Sequence[readout.Note],
    *,
    columns: int,
    rows: int,
    status: str = "",
) -> Drawn:
    """Return exactly `rows` lines of `columns` cells for the charts `shown`, each with its index in the view."""
    room = max(rows - READOUT_ROWS - 1, 2)
    heights = [room // len(shown) + (1 if index < room % len(shown) else 0) for index in range(len(shown))]
    made = [prepare(plot, height - 1) for (_, plot), height in zip(shown, heights, strict=True)]
    each = [plot_margins(plot, item, columns) for (_, plot), item in zip(shown, made, strict=True)]
    margins = Margins(max(item.left for item in each), max(item.right for item in each))
    lines: list[Line] = []
    places = []
    for (index, plot), height, item in zip(shown, heights, made, strict=True):
        body, labels, _ = draw_plot(plot, columns, height - 1, item, margins)
        inner = columns - margins.left - margins.right
        places.append(Place(index, len(lines), len(lines) + height, margins.left, inner))
        hidden = f" {index + 1}/{len(view.charts)} " if len(shown) < len(view.charts) else ""
        labels += [(columns - len(hidden) - 1, hidden, "label")] if hidden and index == view.focus else []
        lines += [rule(columns, *labels), *body]
    chosen = next((plot for index, plot in shown if index == view.focus), shown[0][1])
    lines.append(
        rule(
            columns,
            (0, "─ values ", "title"),
            *_state(view, place, columns, status),
        )
    )
    lines += readout.lines(chosen, axes, notes, columns, READOUT_ROWS - 1)
    lines.append(keys_line(view, columns))
    return Drawn([fit(pieces, columns) for pieces in lines[:rows]], tuple(places))


def _state(view: ChartView, place: Extent, columns: int, status: str) -> list[tuple[int, str, str]]:
    words = ["all steps" if view.span is None else f"{view.span:,.0f} steps"]
    words.append("live" if view.following and place.live else "paused")
    words += [status] if status else []
    text = f" {' · '.join(words)} "
    return [(columns - len(text) - 1, text, "label")]


_KEYS = (
    ("m", "m", "metrics"),
    ("+", "plus", ""),
    ("-", "minus", "zoom"),
    ("[", "left_square_bracket", ""),
    ("]", "right_square_bracket", "pan"),
    ("z", "z", ""),
    ("v", "v", ""),
    ("f", "f", ""),
    ("tab", "tab", "chart"),
    ("enter", "enter", "alone"),
    ("end", "end", "follow"),
    ("esc", "escape", "reset"),
    ("A", "A", "add"),
    ("R", "R", "drop"),
)


def keys_line(view: ChartView, columns: int) -> Line:
    """Return the charts' own keys with what they are set to; a click presses one."""
    chart = view.chart
    soft = f"smooth {chart.smoothing:.0%}" if chart.smoothing else "smooth off"
    said = {"z": f"x: {view.x}", "v": "y: log" if chart.log else "y: linear", "f": soft}
    parts: list[list[Piece]] = []
    joined: list[Piece] = []
    for display, key, words in _KEYS:
        press = f"app.press({key!r})"
        words = said.get(key, words)
        joined += [Piece(display, "key", press), Piece(f" {words}" if words else " ", "label", press)]
        if words:
            parts.append(joined)
            joined = []
    return groups(parts, columns, gap=" ")


def side_by_side(panels: Sequence[Plot], columns: int, room: int) -> list[Line]:
    """Return the plots in exactly `room` lines of `columns` cells, each as wide as the others."""
    if room < 2 or not panels:
        return [fit((), columns)] * max(room, 0)
    sizes = widths(columns, len(panels))
    blocks = [draw_panel(item, size, room - 1) for item, size in zip(panels, sizes, strict=True)]
    return beside(blocks, columns, room - 1)


def beside(blocks: Sequence[Block], columns: int, rows: int) -> list[Line]:
    """Return blocks of `rows` lines side by side under one rule."""
    labels: list[tuple[int, str, str]] = []
    start = 0
    for index, (_, own, size) in enumerate(blocks):
        labels += [(start - 1, "┬", "rule")] if index else []
        labels += [(start + at, text, role) for at, text, role in own]
        start += size + 1
    lines = [rule(columns, *labels)]
    for place in range(rows):
        pieces: list[Piece] = []
        for index, (body, _, size) in enumerate(blocks):
            pieces += [Piece("│", "rule")] if index else []
            pieces += fit(body[place], size)
        lines.append(fit(pieces, columns))
    return lines


def widths(columns: int, count: int) -> list[int]:
    """Return cells of each of `count` blocks, a line between them."""
    room = columns - (count - 1)
    sizes = [room // count] * count
    sizes[0] += room - sum(sizes)
    return sizes
