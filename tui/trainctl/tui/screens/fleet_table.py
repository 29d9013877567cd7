"""The fleet table: a row a rank with its own speed, where its step went, its memory and its device.

A rank's own rate is tokens / (data + forward + backward), for in a synchronous run its part of the fleet's rate is only
its share. Unknown is n/a; what is old is dimmed and its age says how old; a lost rank stays, and says why.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import msgspec
import numpy as np

from trainctl.protocol.messages import METRICS, RankStep, RunView, is_by_name, metric_of
from trainctl.tui.screens import fleet_cells
from trainctl.tui.state import series, table_fields
from trainctl.tui.state.filter_language import Filter
from trainctl.tui.state.rank_rows import BAD_STATES, Row, fleet_rate, rows, sum_of_own_rates
from trainctl.tui.state.table_fields import SortOrder, Table, column_title
from trainctl.tui.state.table_schemas import FLEET
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import NA, compact, gigabytes, rate, seconds
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, line, pad_left, plain, width

_WORST_FIRST = (
    "failed",
    "lost",
    "hung",
    "late",
    "rejoining",
    "draining",
    "drained",
    "starting",
    "ready",
    "paused",
    "run",
    "done",
)


@dataclass(frozen=True)
class Arrangement:
    """The table as a person wants it: filtered, sorted, which nodes opened, with which further metrics."""

    filter: Filter[Row] | None = None
    order: table_fields.SortOrder = table_fields.SortOrder()  # noqa: RUF009  frozen itself
    opened: frozenset[str] = frozenset()
    metrics: tuple[str, ...] = ()
    table: Table[Row] = FLEET  # what can be filtered and sorted by


UNARRANGED = Arrangement()


def arranged(rows: Sequence[Row], wanted: Arrangement) -> list[Row]:
    """Return the rows to be shown."""
    kept = wanted.filter.kept(rows) if wanted.filter is not None else list(rows)
    ranks, of_node = Counter(row.view.node for row in rows), defaultdict(list)  # of a node, filtered or not; those kept
    for row in kept:
        of_node[row.view.node].append(row)
    tops = [_node(own, node in wanted.opened) if ranks[node] > 1 else own[0] for node, own in of_node.items()]
    made = []
    for top in table_fields.in_order(tops, wanted.order, wanted.table):
        made.append(top)
        if top.open:
            own = [replace(row, child=True) for row in of_node[top.view.node]]
            made += table_fields.in_order(own, wanted.order, wanted.table)
    return made


def row_count(run: RunView | None, opened: frozenset[str]) -> int:
    """Return how many rows there are without a filter."""
    nodes = Counter(view.node for view in run.ranks) if run is not None else {}
    return len(nodes) + sum(ranks for node, ranks in nodes.items() if node in opened and ranks > 1)


def _node(members: Sequence[Row], is_open: bool) -> Row:
    """Return one row for the ranks of a node: sums of shares, rates and memory, the slowest one's step, the worst
    state."""
    working = [row for row in members if row.step is not None]
    slowest = max(working, key=lambda row: row.step.phases.busy if row.step else 0.0, default=members[0])
    worst = min(members, key=lambda row: _WORST_FIRST.index(row.view.state))
    rates = [row.own_rate for row in members if not row.out]
    shares = [row.view.share for row in members if row.view.share is not None]
    view = msgspec.structs.replace(
        members[0].view,
        state=worst.view.state,
        since_at=worst.view.since_at,
        share=sum(shares) if len(shares) == len(members) else None,
        why=f"rank {worst.view.rank}: {worst.view.why}" if worst.view.why else "",
    )
    ages = [row.age for row in members if row.age is not None]
    return replace(
        slowest,
        view=view,
        place=members[0].place,
        step=_together(slowest, working),
        age=max(ages, default=None),
        old=any(row.old for row in members),
        own_rates=_sum([row.own_rates for row in working]),
        own_rate=sum(r for r in rates if r is not None) if rates and None not in rates else None,
        slow_phase=next((row.slow_phase for row in members if row.slow_phase), ""),
        selected=not is_open and any(row.selected for row in members),
        members=tuple(row.view.rank for row in members),
        open=is_open,
        micro=next(iter({row.passes for row in members})) if len({row.passes for row in members}) == 1 else None,
    )


def _together(slowest: Row, working: Sequence[Row]) -> RankStep | None:
    """Return the slowest rank's step with what all have together, of the metrics that each of them has."""
    if slowest.step is None:
        return None
    every = [row.step.values for row in working if row.step is not None]
    names = [name for name in slowest.step.values if all(name in values for values in every)]
    values = {name: metric_of(name).folded([values[name] for values in every]) for name in names}
    return msgspec.structs.replace(slowest.step, values=values)


def _sum(windows: Sequence[series.Window]) -> series.Window:
    """Return the sum of rates over the steps that all have; empty where they aren't of the same steps."""
    if not windows or any(not np.array_equal(window.first, windows[0].first) for window in windows):
        return series.empty()
    return replace(windows[0], last=np.sum([window.last for window in windows], axis=0))


def rank_at(shown: Sequence[Row], by: int) -> int | None:
    """Return the rank that lies `by` rows from the selected one, None where the table is empty; a closed node is chosen
    by its first rank."""
    ranks = [row.view.rank for row in shown if not row.open]
    at = next((row.view.rank for row in shown if row.selected and not row.open), None)
    if not ranks:
        return None
    place = ranks.index(at) + by if at in ranks else 0 if by > 0 else len(ranks) - 1
    return ranks[min(max(place, 0), len(ranks) - 1)]


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
    cell: fleet_cells.Cell
    right: bool = False
    least: int = 60
    gap: int = 1
    field: str = ""


def lines(
    state: ViewState,
    clock: Clock,
    columns: int,
    *,
    total: bool,
    selected: int | None = None,
    wanted: Arrangement = UNARRANGED,
    room: int | None = None,
) -> list[Line]:
    """Return the table: head, a line a node or an opened one's rank, and with `total` a FLEET line; each `columns`
    wide.

    Where that is more than `room` lines, those around the selected one are shown and the others counted.
    """
    table, last = rows(state, clock, selected), state.last_step
    title = f"STEP {seconds(last.value.step_seconds)}" if last else "STEP"
    shown = layout(columns, any(row.gpu for row in table), title, clock, wanted.metrics)
    body = arranged(table, wanted)
    low = [fit((Piece("the filter hides all ranks; esc clears it", "dim"),), columns)] if table and not body else []
    low += [fit(_total(state, table, shown), columns)] if total and table else []
    if room is not None and 1 + len(body) + len(low) > room:
        keep = max(room - 2, 0)
        at = next((at for at, row in enumerate(body) if row.selected and not row.open), 0)
        start = min(max(at - keep + 1, 0), len(body) - keep)
        more = Piece(f"… {len(body) - keep} more ranks (up and down show them)", "dim")
        body, low = body[start : start + keep], [fit((more,), columns)]
    return [_head(shown, columns, wanted.order), *(_body(row, shown, columns) for row in body), *low]


def sortable(state: ViewState, clock: Clock, columns: int, metrics: Sequence[str] = ()) -> list[str]:
    """Return the fields of the columns that a screen of that width shows, in their order."""
    has_gpu = any(row.gpu for row in rows(state, clock))
    return [column.field for column in layout(columns, has_gpu, "", clock, metrics) if column.field]


def layout(columns: int, has_gpu: bool, bar_title: str, clock: Clock, metrics: Sequence[str] = ()) -> list[FleetColumn]:
    """Return the columns that fit, as many of `metrics` as there is room for, the step bar stretched over what is
    left."""
    percent, with_gpu = (fleet_cells.gpu_percent, 118) if has_gpu else (fleet_cells.cpu_percent, _NEVER)
    device = "GPU" if has_gpu else "CPU"

    def since(row: Row) -> str:
        at = row.view.since_at
        return clock.time_of(at) if at > 0 else NA

    chosen = [
        FleetColumn("NODE", 7, fleet_cells.node, gap=0, field="node"),
        FleetColumn("STATE", 7, fleet_cells.state, field="state"),
        FleetColumn("SINCE", 9, fleet_cells.text(since, "label"), least=150),
        FleetColumn("DEVICE", 9, fleet_cells.device, least=116, field="device"),
        FleetColumn("SHARE", 10, fleet_cells.share, field="share"),
        FleetColumn("MICRO", 6, fleet_cells.micro, field="micro"),
        FleetColumn("OWN T/S", 7, fleet_cells.own, True, field="tok/s"),
        FleetColumn("TREND", 8, fleet_cells.trend, least=112, gap=2),
        FleetColumn(bar_title, 0, fleet_cells.bar, gap=2, field="busy"),
        FleetColumn("WAIT", 6, fleet_cells.wait, True, 100, field="wait"),
        FleetColumn("MEM GB", 7, fleet_cells.memory, True, 70, gap=2, field="mem"),
        FleetColumn("HELD", 5, fleet_cells.held, True, 132, field="held"),
        FleetColumn(device, 4, percent, True, 76, field=device.lower()),
        FleetColumn("CLK", 5, fleet_cells.clock_rate, True, with_gpu, field="clock"),
        FleetColumn("W", 4, fleet_cells.watts, True, with_gpu, field="power"),
        FleetColumn("°C", 4, fleet_cells.celsius, True, 104, field="temp"),
        FleetColumn("LINK", 10, fleet_cells.link, least=132, gap=2),
        FleetColumn("AGE", 3, fleet_cells.age, True, field="age"),
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
    headed = [one.name for one in METRICS.values() if one.heading]
    made = []
    for name in dict.fromkeys((*wanted, *headed)):
        one = metric_of(name)
        title = one.heading or one.title[:_LONGEST_TITLE].lower()  # capitals are for the columns above
        field = one.name if is_by_name(one.name) else ""
        made.append(FleetColumn(title, max(len(title), 7), fleet_cells.metric(one), True, field=field))
    ends = accumulate(column.size + column.gap for column in made)
    return [column for column, end in zip(made, ends, strict=True) if end <= room]


def _head(shown: list[FleetColumn], columns: int, order: SortOrder) -> Line:
    """Return the titles; that of the column that the table is sorted by with an arrow, in its gap where it has no
    room."""
    parts: list[Piece] = []
    for column in shown:
        gap = 0 if column.right else column.gap
        size = column.gap + column.size - gap
        title = column_title(column.field, column.title, size, order, right=column.right)
        parts.append(title._replace(text=" " * gap + title.text))
    return fit(parts, columns)


def _body(row: Row, shown: list[FleetColumn], columns: int) -> Line:
    parts: list[Piece] = []
    for column in _with_room_for_why(row, shown) if row.says_why else shown:
        cell = column.cell(row, column.size)
        cell = pad_left(cell, column.size) if column.right else fit(cell, column.size)
        parts += [Piece(" " * column.gap), *cell] if column.gap else cell
    opens = f"screen.toggle_node({row.view.rank})" if row.members else f"app.node({row.view.rank})"
    keep = ("bad", "warning", "cursor") if row.old or row.out else ()
    return tuple(
        [
            Piece(text, role if not keep or role in keep else "old", opens)
            for text, role, _ in fit(parts, columns)
            if text
        ]
    )


def _with_room_for_why(row: Row, shown: list[FleetColumn]) -> list[FleetColumn]:
    """Return the columns; where a why is longer than the step's bar, which it stands for, it goes on over those to its
    right that would say n/a."""
    at = next(place for place, column in enumerate(shown) if column.cell is fleet_cells.bar)
    needed = width((Piece(clean(row.view.why)),))
    size, end = shown[at].size, at + 1
    while size < needed and end < len(shown) - 1 and plain(shown[end].cell(row, shown[end].size)) == NA:
        size, end = size + shown[end].gap + shown[end].size, end + 1
    return [*shown[:at], replace(shown[at], size=size), *shown[end:]]


def _total(state: ViewState, table: list[Row], shown: list[FleetColumn]) -> Line:
    assert state.run is not None
    ranks = state.run.ranks
    live = sum(1 for view in ranks if view.state not in BAD_STATES and view.share != 0)
    shares = [view.share for view in ranks if view.share is not None]
    memory = [row.step.peak_or_held_bytes if row.step else None for row in table if not row.out]
    known = [size for size in memory if size is not None]
    texts = {
        "NODE": "FLEET",
        "STATE": f"{live}/{len(ranks)}",
        "SHARE": str(sum(shares)) if len(shares) == len(ranks) else NA,
        "OWN T/S": rate(sum_of_own_rates(state)),
        "MEM GB": gigabytes(sum(known)) if known and len(known) == len(memory) else NA,
    }
    together = fleet_rate(state)
    parts = []
    for column in shown:
        text = texts.get(column.title, "")
        if column.title.startswith("STEP"):
            text = f"{compact(together)} together"
        text = text.rjust(column.size) if column.right else text.ljust(column.size)
        parts.append(" " * column.gap + text[: column.size])
    return line(Piece("".join(parts), "label"))
