"""The part of the merged logs that is on screen: where in them, what is searched for, and its lines; all pure."""

import bisect
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from trainctl.tui.charts.metrics import rank_names
from trainctl.tui.state.filter_language import Filter, parse
from trainctl.tui.state.merged_log import LogEntry, LogKey, LogTail
from trainctl.tui.state.table_schemas import LOGS
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import NA, moment
from trainctl.tui.text.styled_line import Line, Piece, clean, ellipsized, filled, fit, line, shorten, split, width
from trainctl.tui.widgets.theme import rank_role

LEVELS = {
    "DEBUG": ("debug", "dim"),
    "INFO": ("info", "dim"),
    "WARNING": ("WARN", "warning"),
    "ERROR": ("ERROR", "bad"),
    "CRITICAL": ("ERROR", "bad"),
}
_TEXT_ROLES = {"WARNING": "warning", "ERROR": "bad", "CRITICAL": "bad", "DEBUG": "dim"}
_NODE_CELLS = 12


@dataclass(frozen=True)
class View:
    """The place in the logs: `top` is the first line shown, None while the end is followed; `at` the match that was
    jumped to; `shift` the cells of the text left out at its start."""

    query: Filter[LogEntry] = parse("", LOGS)  # noqa: RUF009  frozen itself
    problem: str = ""  # of what is typed; the search before it stays
    only: bool = False  # lines without a match are left out
    top: LogKey | None = None
    at: LogKey | None = None
    shift: int = 0


@dataclass(frozen=True)
class Named:
    """A rank's log as it is named on screen."""

    node: str
    label: str
    role: str
    letter: str


def names_of(state: ViewState) -> dict[int, Named]:
    """Return every rank of the run shown, in the colour and with the letter it has in the charts."""
    nodes = {view.rank: view.node for view in state.run.ranks} if state.run else {}
    letters = string.ascii_lowercase if state.run and state.lettered else " "
    return {
        rank: Named(nodes[rank], label, rank_role(place), letters[place % len(letters)].strip())
        for place, (rank, label) in enumerate(rank_names(state.run).items())
    }


def first_shown(view: View, entries: Sequence[LogEntry], rows: int) -> int:
    """Return the index of the first line on screen."""
    last = max(len(entries) - rows, 0)
    if view.top is None:
        return last
    return min(bisect.bisect_left(entries, view.top, key=lambda entry: entry.key), last)


def scrolled(view: View, entries: Sequence[LogEntry], rows: int, by: int) -> View:
    """Return the view `by` lines further down; at the end it is followed again."""
    first = max(first_shown(view, entries, rows) + by, 0)
    return replace(view, top=None if first + rows >= len(entries) else entries[first].key)


def held(view: View, entries: Sequence[LogEntry], rows: int) -> View:
    """Return the end followed if it wasn't, else held where it is."""
    if view.top is not None or not entries:
        return replace(view, top=None)
    return replace(view, top=entries[first_shown(view, entries, rows)].key)


def jumped(view: View, entries: Sequence[LogEntry], rows: int, *, back: bool) -> View:
    """Return the view at the next match, or the one before, round the ends; from the last line on screen where there
    was none."""
    if not view.query.text or not entries:
        return view
    if view.at is not None:
        start = bisect.bisect_left(entries, view.at, key=lambda entry: entry.key)
    else:
        start = min(first_shown(view, entries, rows) + rows, len(entries)) if back else -1
    count = len(entries)
    places = ((start - step if back else start + step) % count for step in range(1, count + 1))
    place = next((place for place in places if view.query.keeps(entries[place])), None)
    return view if place is None else _showing(replace(view, at=entries[place].key), entries, rows, place)


def _showing(view: View, entries: Sequence[LogEntry], rows: int, place: int) -> View:
    first = first_shown(view, entries, rows)
    if first <= place < first + rows:
        return view
    first = max(place - rows // 2, 0)
    return replace(view, top=None if first + rows >= len(entries) else entries[first].key)


def lines(
    tail: LogTail,
    view: View,
    entries: Sequence[LogEntry],
    names: Mapping[int, Named],
    clock: Clock,
    *,
    columns: int,
    rows: int,
) -> list[Line]:
    """Return the log in exactly `rows` lines; with one rank its name is left out."""
    first = first_shown(view, entries, rows)
    shown = entries[first : first + rows]
    size = min(max((len(item.label) for item in names.values()), default=0), _NODE_CELLS) if len(names) > 1 else 0
    now, times = moment(clock.wall(), clock.zone), [moment(entry.at, clock.zone) for entry in shown]
    is_today = all(at is None or now is None or at.date() == now.date() for at in times)
    layout = "%H:%M:%S" if is_today else "%d %b %H:%M:%S"

    def drawn(entry: LogEntry, at: datetime | None) -> Line:
        name = names.get(entry.rank, Named(entry.node, entry.node, "label", "?"))
        when = f"{at:{layout}}" if at is not None else NA.ljust(8 if is_today else 15)
        parts = [Piece(" " * len(when) if entry.stray else when, "dim"), Piece(" ")]
        if size:
            letter = f"{name.letter} " if name.letter else ""
            label = shorten(clean(name.label), size)
            parts.append(Piece(f"{letter}{label}".ljust(size + len(letter)) + " ", name.role))
        word, role = LEVELS.get(entry.level, ("", "dim")) if not entry.stray else ("", "dim")
        parts.append(Piece(word.ljust(5) + " ", role))
        body = split(_marked(entry, view), view.shift)[1]
        return fit((*parts, *ellipsized(body, columns - width(parts))), columns)

    if not shown:
        return filled([line(Piece(_why_empty(tail, names), "dim"))], columns, rows)
    return filled([drawn(entry, at) for entry, at in zip(shown, times, strict=True)], columns, rows)


def _why_empty(tail: LogTail, names: Mapping[int, Named]) -> str:
    if not names:
        return "no run yet, so no logs"
    if any(entry.rank in names for entry in tail.entries):
        return "no matching lines"
    if all(rank in tail.problems and rank not in tail.files for rank in names):
        return "no log could be read"
    return "nothing has been written yet" if any(rank in tail.files for rank in names) else "reading the logs"


def _marked(entry: LogEntry, view: View) -> Line:
    text, role = clean(entry.text), _TEXT_ROLES.get(entry.level, "dim" if entry.stray else "text")
    parts, at = [], 0
    found_role = "cursor" if entry.key == view.at else "mark"
    spans = [found.span() for pattern in view.query.sought for found in pattern.finditer(text)]
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        if at <= start < end:
            parts += [Piece(text[at:start], role), Piece(text[start:end], found_role)]
            at = end
    return line(*parts, Piece(text[at:], role))


def title(tail: LogTail, view: View, entries: Sequence[LogEntry], found: int, names: Mapping[int, Named]) -> str:
    """Return what the rule above the log says."""
    who = next(iter(names.values())).label if len(names) == 1 else f"{len(names)} logs"
    lines = f"{len(entries):,} line" + "s" * (len(entries) != 1)
    words = [f"log of {clean(who)}" if len(names) == 1 else who, lines]
    if tail.left_out:
        words.append("older ones left out")
    words.append("live" if view.top is None else "paused")
    if view.query.text:
        words.append(f"{clean(view.query.text)!r} in {found:,}")
    return ", ".join(words)


def problems(tail: LogTail, names: Mapping[int, Named]) -> str:
    """Return whose log can't be read now, and why; empty if all can."""
    problems = [f"{clean(names[rank].label)}: {clean(why)}" for rank, why in tail.problems.items() if rank in names]
    return "; ".join(problems)
