"""The Events screen as lines: a head, and a row an event with who, when, what, before and after, how it ended, and what
it did to the speed. Wide screens give each a column; narrow ones have them in one sentence."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainctl.protocol.messages import Event, event_prose
from trainctl.protocol.messages.events import nodes_of
from trainctl.tui.charts.marks import numbered
from trainctl.tui.commands import undo
from trainctl.tui.screens import alerts_view
from trainctl.tui.state import effects, run_events, table_fields
from trainctl.tui.state.run_events import event_words
from trainctl.tui.state.table_fields import column_title
from trainctl.tui.state.table_schemas import EventRow
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import count
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, fit, line, plain, shorten, spread, width

_RECENT_WHO_CELLS = 7


def alert_label(event: Event) -> tuple[str, str]:
    """Return the word before an event that is out of the common run, and the role of its text. A command that was
    refused says so itself."""
    if event.severity == "error":
        return "ERROR ", "bad"
    if event.severity != "warning":
        return "", "text"
    if event.kind == "command":
        return "", "warning"
    return "ALERT " if event.kind == "alert" else "WARN ", "warning"


def recent_lines(state: ViewState, clock: Clock, columns: int, rows: int) -> list[Line]:
    """Return the alerts that call for somebody, and after them the newest events, newest first, in exactly `rows`
    lines."""
    numbers = numbered(state)
    lines = alerts_view.overview_lines(state, clock, columns, max(rows - 1, 1))[:rows]
    newest = list(reversed(alerts_view.without_open(state)))[: rows - len(lines)]
    lines += [event_line(event, state, clock, columns, numbers.get(event.id, "")) for event in newest]
    if not lines and rows:
        lines = [fit(line(Piece("nothing has happened yet", "dim")), columns)]
    return filled(lines, columns, rows)


def event_line(event: Event, state: ViewState, clock: Clock, columns: int, number: str = "") -> Line:
    """Return one event in `columns` cells; its end carries the measured effect and the number of its mark."""
    alert, role = alert_label(event)
    head = line(
        Piece(f"{clock.time_of(event.at)} ", "dim"),
        Piece(shorten(clean(event.by or "-"), _RECENT_WHO_CELLS).ljust(_RECENT_WHO_CELLS) + " ", "label"),
        Piece(alert, role),
    )
    measured = effect(state, event) if number else None
    tail = line(
        Piece(f"  {effect_text(measured)}" if measured is not None else "", effect_role(measured)),
        Piece(f"  {number}" if number else "", "mark"),
    )
    room = max(columns - width(head) - width(tail) - 1, 1)
    body = Piece(shorten(clean(event_words(event, "→")), room), role)
    return fit(spread((*head, body), tail, columns), columns)


def effect(state: ViewState, event: Event) -> float | None:
    """Return relative change of the fleet's rate: medians of up to 20 steps after and before, as far as nothing else
    changed the plan there; None with fewer than 5 on a side, or where it left all as it was."""
    found = effects.measured(state.lately("tokens_per_second"), state.run_events, event)
    return found.change if found is not None and run_events.changes_speed(event) else None


def effect_text(change: float) -> str:
    """Return a relative change in words; nothing for one that is no number."""
    return "" if not math.isfinite(change) else f"tok/s {100 * change:+.0f}%" if abs(change) >= 0.005 else "tok/s +0%"


def effect_role(change: float | None) -> str:
    """Return how a relative change of the rate looks."""
    return "dim" if change is None or abs(change) < 0.02 else "good" if change > 0 else "warning"


WIDE_COLUMNS = 116
"""Columns from which each part has a column of its own."""
SORTED_BY = ("age", "by", "verb", "step", "outcome", "effect")
_WHO, _WHAT, _OUTCOME, _EFFECT = 8, 17, 9, 10


@dataclass(frozen=True)
class Context:
    """The context that all rows are drawn with: their marks' numbers by event id, and which events undid which."""

    clock: Clock
    numbers: Mapping[int, str] = field(default_factory=dict)
    undid: Mapping[int, Event] = field(default_factory=dict)


def head(columns: int, rows: Sequence[EventRow], order: table_fields.SortOrder, context: Context) -> Line:
    """Return the titles, to be clicked; the one that the table is sorted by carries an arrow."""
    when = _when_cells(rows, context)
    if columns < WIDE_COLUMNS:
        titles = [("age", "WHEN", when + 1), ("by", "WHO", _WHO), ("verb", "WHAT", columns - when - _WHO - _EFFECT - 4)]
        titles += [("effect", "EFFECT", _EFFECT + 3)]
    else:
        step = _step_cells(rows)
        room = columns - when - _WHO - _WHAT - step - _OUTCOME - _EFFECT - 9
        titles = [
            ("age", "WHEN", when + 1),
            ("by", "WHO", _WHO),
            ("verb", "WHAT", _WHAT),
            ("step", "STEP", step + 2),
            ("", "BEFORE → AFTER", room),
            ("outcome", "OUTCOME", _OUTCOME + 1),
            ("effect", "EFFECT", _EFFECT + 1),
            ("", "MARK", 4),
        ]
    return fit([column_title(*each, order) for each in titles], columns)


def lines(rows: Sequence[EventRow], shown: range, cursor: int, columns: int, context: Context) -> list[Line]:
    """Return the rows of `shown`, the one at `cursor` marked; widths are those that all `rows` need."""
    when, step = _when_cells(rows, context), _step_cells(rows)
    rows_drawn = []
    for index in shown:
        row = rows[index]
        is_wide = columns >= WIDE_COLUMNS
        drawn = _wide(row, columns, when, step, context) if is_wide else _narrow(row, columns, when, context)
        role = "cursor" if index == cursor else ""
        rows_drawn.append(tuple(Piece(p.text, role or p.role, f"screen.pick({index})") for p in fit(drawn, columns)))
    return rows_drawn


def with_key(row: Line, key: str, action: str) -> Line:
    """Return the row with a key in its widest gap, where that has room for it; a click on it runs the action."""
    text = plain(row)
    gap = max(re.finditer(r" +", text), key=lambda found: found.end() - found.start(), default=None)
    if gap is None or gap.end() - gap.start() < len(key) + 4:
        return row
    at, first = gap.end() - 2 - len(key), row[0]
    before, after = first._replace(text=text[:at]), first._replace(text=text[at + len(key) :])
    return line(before, Piece(key, first.role, action), after)


def _when_cells(rows: Sequence[EventRow], context: Context) -> int:
    return max((len(_when(row, context)) for row in rows), default=5)


def _step_cells(rows: Sequence[EventRow]) -> int:
    return max([4, *(len(count(row.event.step)) for row in rows if row.event.step is not None)])


def _when(row: EventRow, context: Context) -> str:
    return context.clock.time_of(row.event.at)


def _ends(row: EventRow, context: Context) -> Line:
    number = context.numbers.get(row.event.id, "")
    effect = Piece(effect_text(row.effect) if row.effect is not None else "", effect_role(row.effect))
    mark = max((len(text) for text in context.numbers.values()), default=1)
    return (*fit(line(effect), _EFFECT), Piece(f"  {number:>{mark}}", "mark"))


def _narrow(row: EventRow, columns: int, when: int, context: Context) -> Line:
    event = row.event
    alert, role = alert_label(event)
    start = line(Piece(f"{_when(row, context):<{when}} ", "dim"), _who(event), Piece(alert, role))
    tail = _ends(row, context)
    room = max(columns - width(start) - width(tail) - 1, 1)
    text = clean(run_events.event_words(event, "→")) + _undoes(event, context)
    struck = "dim" if row.undone else role
    return spread((*start, Piece(shorten(text, room), struck)), tail, columns)


def _wide(row: EventRow, columns: int, when: int, step: int, context: Context) -> Line:
    event = row.event
    alert, role = alert_label(event)
    room = columns - when - _WHO - _WHAT - step - _OUTCOME - _EFFECT - 9
    changed = clean(event_prose.brief(event.data).replace(event_prose.ARROW, "→"))
    text = shorten(alert + changed + _undoes(event, context), room - 1)
    outcome = "undone" if row.undone else event.outcome or ""
    what = shorten(clean(event.verb if event.kind == "command" and event.verb else event.kind), _WHAT - 1)
    return line(
        Piece(f"{_when(row, context):<{when}} ", "dim"),
        _who(event),
        Piece(what.ljust(_WHAT), "strong" if event.kind == "command" else "text"),
        Piece(f"{count(event.step) if event.step is not None else '-':>{step}}  ", "label"),
        *fit(line(Piece(text, "dim" if row.undone else role)), room),
        Piece(f"{outcome:<{_OUTCOME}} ", _outcome_role(event, row.undone)),
        *_ends(row, context),
    )


def _outcome_role(event: Event, undone: bool) -> str:
    if undone or event.outcome is None:
        return "dim"
    return "good" if event.outcome == "applied" else "bad"


def _who(event: Event) -> Piece:
    return Piece(shorten(clean(event.by or "-"), _WHO - 1).ljust(_WHO), "label")


def _undoes(event: Event, context: Context) -> str:
    undone = context.undid.get(event.id)
    return f", undoes @{undone.step or 0:,}" if undone is not None else ""


def rows_of(
    events: Sequence[Event], clock: Clock, nodes: Sequence[str], effects: Mapping[int, float | None]
) -> list[EventRow]:
    """Return the events as the filter sees them; `effects` has relative changes of the rate by event id."""
    now, undone = clock.wall(), undo.undone_by(events)
    return [
        EventRow(
            event,
            max(now - event.at, 0.0),
            tuple(node for node in nodes if node in nodes_of(event.data)),
            effects.get(event.id) if run_events.changes_speed(event) else None,
            undone=event.verb is not None and event.id in undone,
        )
        for event in events
    ]
