"""The fleet table: a row a rank with its own speed, where its step went, its memory and its device.

A rank's own rate is tokens / (data + forward + backward), for in a synchronous run its part of the fleet's rate is only
its share. Unknown is n/a; what is old is dimmed and its age says how old; a lost rank stays, and says why.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from trainctl.protocol import messages as m
from trainctl.tui.screens import fleet_cells as c
from trainctl.tui.screens.fleet_grouping import Arrangement, arranged
from trainctl.tui.state.rank_rows import BAD_STATES, Row, fleet_rate, rows, sum_of_own_rates
from trainctl.tui.state.table_fields import SortOrder, column_title
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, line, pad_left, plain, width

_METRICS_FROM = 150
"""Width of the screen from which metrics with a heading have a column."""
_LEAST_BAR = 16
"""Cells that the columns of metrics leave to the step's bar."""
_LONGEST_TITLE = 14
_NEVER = 10_000
"""More columns than any screen has."""


@dataclass(frozen=True)
class FleetColumn:
    """`least` is the screen width from which it is shown; `right` aligns right; `field` is what it is sorted by."""

    title: str
    size: int
    cell: c.Cell
    right: bool = False
    least: int = 60
    gap: int = 1
    field: str = ""


def lines(
    state: ViewState, clock: Clock, columns: int, glyphs: Glyphs, *, total: bool, selected: int | None = None,
    wanted: Arrangement = Arrangement(),  # noqa: B008  frozen
    room: int | None = None,
) -> list[Line]:  # fmt: skip
    """The table: head, a line a node or an opened one's rank, and with `total` a FLEET line; each `columns` wide.

    Where that is more than `room` lines, those around the selected one are shown and the others counted.
    """
    table, last = rows(state, clock, selected), state.last_step
    title = f"STEP {f.seconds(last.value.step_seconds)}" if last else "STEP"
    shown = layout(columns, any(row.gpu for row in table), title, clock, wanted.metrics)
    body = arranged(table, wanted)
    low = [fit((Piece("the filter hides all ranks; esc clears it", "dim"),), columns)] if table and not body else []
    low += [fit(_total(state, table, shown), columns)] if total and table else []
    if room is not None and 1 + len(body) + len(low) > room:
        keep = max(room - 2, 0)
        at = next((at for at, row in enumerate(body) if row.selected and not row.open), 0)
        start = min(max(at - keep + 1, 0), len(body) - keep)
        more = Piece(f"{glyphs.ellipsis} {len(body) - keep} more ranks (up and down show them)", "dim")
        body, low = body[start : start + keep], [fit((more,), columns)]
    return [_head(shown, columns, wanted.order, glyphs), *(_body(row, shown, columns, glyphs) for row in body), *low]


def sortable(state: ViewState, clock: Clock, columns: int, metrics: Sequence[str] = ()) -> list[str]:
    """The fields of the columns that a screen of that width shows, in their order."""
    has_gpu = any(row.gpu for row in rows(state, clock))
    return [column.field for column in layout(columns, has_gpu, "", clock, metrics) if column.field]


def layout(columns: int, has_gpu: bool, bar_title: str, clock: Clock, metrics: Sequence[str] = ()) -> list[FleetColumn]:
    """The columns that fit, as many of `metrics` as there is room for, the step bar stretched over what is left."""
    percent, with_gpu = (c.gpu_percent, 118) if has_gpu else (c.cpu_percent, _NEVER)
    device = "GPU" if has_gpu else "CPU"

    def since(row: Row) -> str:
        at = row.view.since_at
        return f.clock(at, clock.wall(), clock.zone) if at > 0 else f.NA

    chosen = [
        FleetColumn("NODE", 7, c.node, gap=0, field="node"),
        FleetColumn("STATE", 7, c.state, field="state"),
        FleetColumn("SINCE", 9, c.text(since, "label"), least=150),
        FleetColumn("DEVICE", 9, c.device, least=116, field="device"),
        FleetColumn("SHARE", 10, c.share, field="share"),
        FleetColumn("MICRO", 6, c.micro, field="micro"),
        FleetColumn("OWN T/S", 7, c.own, True, field="tok/s"),
        FleetColumn("TREND", 8, c.trend, least=112, gap=2),
        FleetColumn(bar_title, 0, c.bar, gap=2, field="busy"),
        FleetColumn("WAIT", 6, c.wait, True, 100, field="wait"),
        FleetColumn("MEM GB", 7, c.memory, True, 70, gap=2, field="mem"),
        FleetColumn("HELD", 5, c.held, True, 132, field="held"),
        FleetColumn(device, 4, percent, True, 76, field=device.lower()),
        FleetColumn("CLK", 5, c.clock_rate, True, with_gpu, field="clock"),
        FleetColumn("W", 4, c.watts, True, with_gpu, field="power"),
        FleetColumn("°C", 4, c.celsius, True, 104, field="temp"),
        FleetColumn("LINK", 10, c.link, least=132, gap=2),
        FleetColumn("AGE", 3, c.age, True, field="age"),
    ]
    fixed = sum(column.size + column.gap for column in chosen if columns >= column.least)
    more = _metric_columns(metrics, columns - fixed - _LEAST_BAR) if columns >= _METRICS_FROM else []
    chosen = [column for column in (*chosen[:-2], *more, *chosen[-2:]) if columns >= column.least]
    used = sum(column.size + column.gap for column in chosen)
    # Past 60 cells a longer bar says no more: the space goes to names and devices. Metrics take theirs from the bar.
    own = sum(column.size + column.gap for column in chosen if column in more)
    bar = max(min(columns - used, 60 - own), 8)
    spare = max(columns - used - bar, 0)
    grow = {"NODE": min(spare // 2, 12), "DEVICE": min(spare - spare // 2, 24)}
    grow[bar_title] = bar
    return [
        replace(column, size=column.size + grow[column.title]) if column.title in grow else column for column in chosen
    ]


def _metric_columns(wanted: Sequence[str], room: int) -> list[FleetColumn]:
    """Of the metrics that a person wants, then of those with a heading, as many as fit."""
    headed = [one.name for one in m.METRICS.values() if one.heading]
    made = []
    for name in dict.fromkeys((*wanted, *headed)):
        one = m.metric_of(name)
        title = one.heading or one.title[:_LONGEST_TITLE].lower()  # capitals are for the columns above
        field = one.name if m.is_by_name(one.name) else ""
        made.append(FleetColumn(title, max(len(title), 7), c.metric(one), True, field=field))
    ends = accumulate(column.size + column.gap for column in made)
    return [column for column, end in zip(made, ends, strict=True) if end <= room]


def _head(shown: list[FleetColumn], columns: int, order: SortOrder, glyphs: Glyphs) -> Line:
    """The titles; that of the column that the table is sorted by with an arrow, in its gap where it has no room."""
    parts: list[Piece] = []
    for column in shown:
        gap = 0 if column.right else column.gap
        size = column.gap + column.size - gap
        title = column_title(column.field, column.title, size, order, glyphs, right=column.right)
        parts.append(title._replace(text=" " * gap + title.text))
    return fit(parts, columns)


def _body(row: Row, shown: list[FleetColumn], columns: int, glyphs: Glyphs) -> Line:
    parts: list[Piece] = []
    for column in _with_room_for_why(row, shown, glyphs) if row.says_why else shown:
        cell = column.cell(row, glyphs, column.size)
        cell = pad_left(cell, column.size) if column.right else fit(cell, column.size)
        parts += [Piece(" " * column.gap), *cell] if column.gap else cell
    opens = f"screen.toggle_node({row.view.rank})" if row.members else f"app.node({row.view.rank})"
    keep = ("bad", "warning", "cursor") if row.old or row.out else ()
    return tuple([
        Piece(text, role if not keep or role in keep else "old", opens) for text, role, _ in fit(parts, columns) if text
    ])  # fmt: skip


def _with_room_for_why(row: Row, shown: list[FleetColumn], glyphs: Glyphs) -> list[FleetColumn]:
    """The columns; where a why is longer than the step's bar, which it stands for, it goes on over those to its right
    that would say n/a."""
    at = next(place for place, column in enumerate(shown) if column.cell is c.bar)
    needed = width((Piece(clean(row.view.why)),))
    size, end = shown[at].size, at + 1
    while size < needed and end < len(shown) - 1 and plain(shown[end].cell(row, glyphs, shown[end].size)) == f.NA:
        size, end = size + shown[end].gap + shown[end].size, end + 1
    return [*shown[:at], replace(shown[at], size=size), *shown[end:]]


def _total(state: ViewState, table: list[Row], shown: list[FleetColumn]) -> Line:
    """Sums over the ranks that take part: shares, own rates, peaks of memory."""
    assert state.run is not None
    ranks = state.run.ranks
    live = sum(1 for view in ranks if view.state not in BAD_STATES and view.share != 0)
    shares = [view.share for view in ranks if view.share is not None]
    memory = [row.step.peak_or_held_bytes if row.step else None for row in table if not row.out]
    known = [size for size in memory if size is not None]
    texts = {
        "NODE": "FLEET", "STATE": f"{live}/{len(ranks)}",
        "SHARE": str(sum(shares)) if len(shares) == len(ranks) else f.NA,
        "OWN T/S": f.rate(sum_of_own_rates(state)),
        "MEM GB": f.gigabytes(sum(known)) if known and len(known) == len(memory) else f.NA,
    }  # fmt: skip
    rate = fleet_rate(state)
    parts = []
    for column in shown:
        text = texts.get(column.title, "")
        if column.title.startswith("STEP"):
            text = f"{f.compact(rate)} together"
        text = text.rjust(column.size) if column.right else text.ljust(column.size)
        parts.append(" " * column.gap + text[: column.size])
    return line(Piece("".join(parts), "label"))
