"""The crosshair in words: the step with its tokens and its time, the values, the nearest mark. Pure."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainctl.protocol.messages import Event, event_prose, metric_of
from trainctl.tui.charts.axis import KINDS, Axis, Kind, tokens
from trainctl.tui.charts.axis import text as axis_text
from trainctl.tui.charts.marks import numbered
from trainctl.tui.charts.metrics import style_of
from trainctl.tui.charts.plot import Plot
from trainctl.tui.charts.traces import Reading, Trace, reading
from trainctl.tui.state import run_events
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import duration
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, groups, line, shorten, spread, width


@dataclass(frozen=True)
class Note:
    """An intervention: its step, the number of its mark, and what it changed, by whom."""

    step: int
    number: str
    text: str


def notes(state: ViewState) -> list[Note]:
    """Return the numbered commands with their before and after."""
    numbers = numbered(state)
    return [
        Note(event.step, numbers[event.id], clean(_change(event)))
        for event in state.run_events
        if event.id in numbers and event.step is not None and run_events.took_effect(event)
    ]


def _change(event: Event) -> str:
    said = event_prose.brief(event.data).replace(event_prose.ARROW, "→")
    return f"{' '.join(word for word in (event.verb, said) if word)} by {event.by or '-'}"


def lines(plot: Plot, axes: Mapping[Kind, Axis], found: Sequence[Note], columns: int, rows: int) -> list[Line]:
    """Return exactly `rows` lines of `columns` cells: where the crosshair is with the mark nearest to it, then the
    values; without a crosshair the newest in view."""
    at = plot.crosshair if plot.crosshair is not None and plot.first <= plot.crosshair < plot.last + 1 else None
    head = _where(plot, at, axes) if at is not None else line(Piece("newest in view", "label"))
    x = float(plot.axis.to_x(at)) if at is not None else None
    drawn = [spread(head, _nearest(plot, found, at, columns - width(head) - 2), columns)]
    values = [_value(trace, x, plot) for trace in plot.traces]
    for row in range(1, rows):
        taken = _fitting(values, columns - (2 if row == rows - 1 else 0))
        drawn.append(groups(values[:taken], columns))
        values = values[taken:]
    if values and rows > 1:
        drawn[-1] = (*drawn[-1], Piece(f"  +{len(values)}", "dim"))
    return [fit(pieces, columns) for pieces in drawn[:rows]]


def _fitting(values: Sequence[Line], columns: int) -> int:
    used, count = 0, 0
    for value in values:
        used += width(value) + 2
        if count and used - 2 > columns:
            break
        count += 1
    return count


def _where(plot: Plot, step: float, axes: Mapping[Kind, Axis]) -> Line:
    """Return `step 18,240 597.7M tokens Fri 14:31:05`, the kind on the axis first."""
    words: dict[Kind, str] = {"step": f"step {int(step):,}"}
    for kind in KINDS[1:]:
        axis = axes.get(kind)
        if axis is None or not axis.known:
            continue
        x = float(axis.to_x(step))
        low, high = float(axis.to_x(plot.first)), float(axis.to_x(plot.last + 1))
        words[kind] = f"{tokens(x, high - low)} tokens" if kind == "tokens" else _moment(axis, x, plot.zone)
    order = sorted(words, key=lambda kind: kind != plot.axis.kind)
    return line(
        *(piece for kind in order for piece in (Piece(words[kind], "strong" if kind == order[0] else "text"), "  "))
    )


def _moment(axis: Axis, x: float, zone: datetime.tzinfo | None) -> str:
    if axis.origin_seconds:
        return f"{duration(x)} in"
    day, time = axis_text(axis, x, 2 * 86400, zone).split(" ")[0], axis_text(axis, x, 1.0, zone)
    return f"{day} {time}"


def _nearest(plot: Plot, found: Sequence[Note], at: float | None, columns: int) -> Line:
    inside = [note for note in found if plot.first <= note.step <= plot.last]
    if not inside or columns < 16:
        return ()
    note = min(inside, key=lambda item: abs(item.step - at) if at is not None else -item.step)
    head = line(Piece(f"{note.number} ", "mark"), f"@{note.step:,} ")
    return (*head, Piece(shorten(note.text, columns - width(head))))


def _value(trace: Trace, x: float | None, plot: Plot) -> Line:
    """Return `a studio 1.81 1.84 1.90`: a line's lowest, mean and highest value there, one where they are the same."""
    name = trace.label or metric_of(trace.metric).title
    lettered = f"{trace.letter} " if trace.letter and len(plot.traces) > 1 and not trace.points else ""
    head = Piece(f"{lettered}{name} ", trace.role)
    read = reading(trace, x if x is not None else _end(trace, plot))
    if read is None:
        return line(head, Piece("n/a", "dim"))
    flaw = " ✕ not finite" if read.broken else ""
    return line(head, *_words(read, trace, style_of(trace.metric).words), Piece(flaw, "bad"))


def _end(trace: Trace, plot: Plot) -> float:
    if not len(trace.window) or not trace.axis.known:
        return plot.edges[1]
    return min(float(trace.axis.to_x(trace.window.newest_step)), plot.edges[1])


def _words(read: Reading, trace: Trace, words: Callable[[float | None], str]) -> list[Piece]:
    if read.minimum == read.maximum or trace.points:
        where = f" @{read.first:,}" if trace.points else ""
        return [Piece(words(read.mean), "strong"), Piece(where, "dim")]
    low, high = f"{words(read.minimum)} ", f" {words(read.maximum)}"
    return [Piece(low, "dim"), Piece(words(read.mean), "strong"), Piece(high, "dim")]
