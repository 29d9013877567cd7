"""Events as lines: when, by whom, what, before and after, at which step, and what a command did to the speed."""

import math

from trainctl.protocol import messages as m
from trainctl.tui.charts.marks import numbered
from trainctl.tui.screens import alerts_view
from trainctl.tui.state import effects, run_events
from trainctl.tui.state.run_events import event_words
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, line, shorten, spread, width

_WHO_CELLS = 7


def label(event: m.Event) -> tuple[str, str]:
    """The word before an event that is out of the common run, and the role of its text. A command that was refused
    says so itself."""
    if event.severity == "error":
        return "ERROR ", "bad"
    if event.severity != "warning":
        return "", "text"
    if event.kind == "command":
        return "", "warning"
    return "ALERT " if event.kind == "alert" else "WARN ", "warning"


def lines(state: ViewState, clock: Clock, columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """The alerts that call for somebody, and after them the newest events, newest first, in exactly `rows` lines."""
    numbers = numbered(state)
    made = alerts_view.overview_lines(state, clock, columns, max(rows - 1, 1), glyphs)[:rows]
    newest = list(reversed(alerts_view.without_open(state)))[: rows - len(made)]
    made += [event_line(event, state, clock, columns, glyphs, numbers.get(event.id, "")) for event in newest]
    if not made and rows:
        made = [fit(line(Piece("nothing has happened yet", "dim")), columns)]
    return [*made, *([fit((), columns)] * (rows - len(made)))]


def event_line(event: m.Event, state: ViewState, clock: Clock, columns: int, glyphs: Glyphs, number: str = "") -> Line:
    """One event in `columns` cells; its end carries the measured effect and the number of its mark."""
    alert, role = label(event)
    head = line(
        Piece(f"{f.clock(event.at, clock.wall(), clock.zone)} ", "dim"),
        Piece(shorten(clean(event.by or "-"), _WHO_CELLS, glyphs.ellipsis).ljust(_WHO_CELLS) + " ", "label"),
        Piece(alert, role),
    )
    measured = effect(state, event) if number else None
    tail = line(Piece(f"  {effect_text(measured)}" if measured is not None else "", effect_role(measured)),
                Piece(f"  {number}" if number else "", "mark"))  # fmt: skip
    room = max(columns - width(head) - width(tail) - 1, 1)
    body = Piece(shorten(glyphs.text(clean(event_words(event, glyphs.arrow))), room, glyphs.ellipsis), role)
    return fit(spread((*head, body), tail, columns), columns)


def effect(state: ViewState, event: m.Event) -> float | None:
    """Relative change of the fleet's rate: medians of up to 20 steps after and before, as far as nothing else changed
    the plan there; None with fewer than 5 on a side, or where it left all as it was."""
    found = effects.measured(state.lately("tokens_per_second"), state.run_events, event)
    return found.change if found is not None and run_events.changes_speed(event) else None


def effect_text(change: float) -> str:
    """A relative change in words; nothing for one that is no number."""
    return "" if not math.isfinite(change) else f"tok/s {100 * change:+.0f}%" if abs(change) >= 0.005 else "tok/s +0%"


def effect_role(change: float | None) -> str:
    """How a relative change of the rate looks."""
    return "dim" if change is None or abs(change) < 0.02 else "good" if change > 0 else "warning"
