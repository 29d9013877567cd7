"""The Overview: one run on one page, head, fleet, charts and events, on screens of any size from 60 x 15 up."""

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.messages import WRITING, RankView
from trainctl.tui.charts.layout import side_by_side
from trainctl.tui.charts.marks import of_run
from trainctl.tui.charts.plot import Plot
from trainctl.tui.charts.traces import Trace
from trainctl.tui.charts.viewport import window_end
from trainctl.tui.commands.context import Values
from trainctl.tui.screens import events_table, fleet_table, header
from trainctl.tui.screens.base import too_small
from trainctl.tui.screens.fleet_table import UNARRANGED, Arrangement
from trainctl.tui.screens.table_screen import TableScreen
from trainctl.tui.state import series, table_schemas
from trainctl.tui.state.rank_rows import BAD_STATES, Row, rows
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import seconds
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, line, rule, shorten
from trainctl.tui.widgets.theme import rank_role, run_role

MAX_LINES = 6
"""Lines of ranks in one chart by node."""
_TWO_CHARTS, _THREE_CHARTS = 72, 150
_EVENTS_PART = 0.34


class ChartCache:
    """The charts as last drawn; they are drawn again only when what they show has changed.

    It keeps no window: when all are folded at once, the old ones would stay beside the new.
    """

    def __init__(self) -> None:
        self._shown: tuple[object, ...] = ()
        self._drawn: list[Line] = []

    def lines(self, state: ViewState, columns: int, room: int, selected: int | None = None) -> list[Line]:
        shown = (state.revision, state.events, state.run, columns, room, selected)
        if len(shown) != len(self._shown) or any(a is not b for a, b in zip(shown, self._shown, strict=True)):
            self._shown, self._drawn = shown, chart_lines(state, columns, room, selected)
        return self._drawn


def layout(columns: int, rows: int, ranks: int) -> tuple[int, int, int, int]:
    """Return the rows of head, fleet, charts and events, rules included. The fleet gets what it needs up to half;
    charts and events share the rest 2 : 1."""
    head = 4 if rows >= 36 and columns >= 120 else 3 if rows >= 29 and columns >= 80 else 2
    table = min(1 + max(ranks, 1) + (1 if _with_total(rows, ranks) else 0), max((rows - head) // 2, 2))
    rest = rows - head - table
    events = max(round(rest * _EVENTS_PART), 3)
    charts = rest - events
    if charts < 5:
        charts, events = (rest, 0) if rest < 8 else (5, rest - 5)
    return head, table, charts, events


def _with_total(rows: int, ranks: int) -> bool:
    return ranks > 1 and rows >= 29


def parts(
    state: ViewState,
    clock: Clock,
    columns: int,
    rows: int,
    *,
    selected: int | None = None,
    badge: str = "",
    address: str = "",
    cache: ChartCache | None = None,
    wanted: Arrangement = UNARRANGED,
) -> Iterator[list[Line]]:
    """Return exactly `rows` lines of `columns` cells, each part when it is asked for."""
    count = fleet_table.row_count(state.run, wanted.opened)
    head, fleet, charts, events = layout(columns, rows, count)
    yield header.lines(state, clock, columns, rows=head, badge=badge, address=address)
    if state.run is None:
        why = clean(state.connection.why) if state.connection.state != "connected" else ""
        nothing = "no run yet: trainctl run RUN.toml starts one" if state.heard_at is not None else "connecting"
        table = [line(Piece(why, "warning") if why else Piece(nothing, "dim"))]
    else:
        total = _with_total(rows, count)
        table = fleet_table.lines(state, clock, columns, total=total, selected=selected, wanted=wanted, room=fleet)
    yield filled(table, columns, fleet)
    yield (cache or ChartCache()).lines(state, columns, charts, selected)
    if events:
        title = _events_rule(state, clock, columns, selected)
        yield [title, *events_table.recent_lines(state, clock, columns, events - 1)]


def _events_rule(state: ViewState, clock: Clock, columns: int, selected: int | None) -> Line:
    """Return the events' title, and at its right end why the selected rank is out, or else the rank that the others
    wait for, with the phase that makes them, or else how far a checkpoint is."""
    title = "─ events "
    text, role = _why_out(state, clock, selected) or _straggler(state) or _writing(state) or ("", "")
    if not text:
        return rule(columns, (0, title, "title"))
    text = f" {shorten(text, columns - len(title) - 4)} "
    return rule(columns, (0, title, "title"), (columns - len(text) - 1, text, role))


def _why_out(state: ViewState, clock: Clock, selected: int | None) -> tuple[str, str] | None:
    """Return the selected rank's state, since when and why, with its role, where it reports no steps."""
    view = next((view for view in (state.run.ranks if state.run else ()) if view.rank == selected), None)
    if view is None or not view.why or not view.is_silent:
        return None
    since = clock.time_of(view.since_at)
    role = "bad" if view.state in BAD_STATES else "warning"
    return f"{clean(view.node)} {view.state} since {since}: {clean(view.why)}", role


def _straggler(state: ViewState) -> tuple[str, str] | None:
    slow = state.run.straggler if state.run else None
    if slow is None:
        return None
    node = shorten(clean(slow.node), 20)
    return f"straggler {node}: +{seconds(slow.excess_seconds)} in {slow.phase}", "warning"


def _writing(state: ViewState) -> tuple[str, str] | None:
    found = (view for view in (state.run.ranks if state.run else ()) if view.why.startswith(WRITING))
    view = next(found, None)
    return (f"{clean(view.node)} is {clean(view.why)}", "dim") if view is not None else None


def chart_lines(state: ViewState, columns: int, room: int, selected: int | None = None) -> list[Line]:
    """Return the charts side by side under one rule, in exactly `room` lines."""
    plots = [loss_panel(state)]
    plots += [busy_panel(state, selected)] if columns >= _TWO_CHARTS else []
    plots += [rate_panel(state, selected)] if columns >= _THREE_CHARTS else []
    return side_by_side(plots, columns, room)


def loss_panel(state: ViewState) -> Plot:
    """Return loss over the whole run, with the evaluations as points."""
    evaluations = state.window("eval_loss")
    tracks = [Trace(state.window("loss"), "", run_role(0), band="band")]
    if len(evaluations):
        tracks.append(Trace(evaluations, "eval", run_role(1), points=True))
    return Plot("loss", tuple(tracks), *_range(state), marks=of_run(state))


def busy_panel(state: ViewState, selected: int | None = None) -> Plot:
    """Return data, forward and backward of each rank, as means of as many steps as a bucket has, which tell who is
    slow, and the group's step, which is the same for all; the first ones of a run, which warm up, don't set the
    scale."""
    plot = _by_rank(state, "busy_seconds", "busy seconds by node", selected, max_times=4.0)
    if state.run is None or len(state.run.ranks) < 2:
        return plot
    return replace(plot, traces=(Trace(series.means(state.window("step_seconds")), "step", "dim"), *plot.traces))


def rate_panel(state: ViewState, selected: int | None = None) -> Plot:
    """Return own rates of each rank."""
    return _by_rank(state, "own_tokens_per_second", "own tok/s by node", selected)


def _by_rank(state: ViewState, metric: str, title: str, selected: int | None, max_times: float = math.inf) -> Plot:
    """Return a line for each rank; of more than can be told apart, their span and mean, and the lines of the one that
    the others wait for and of the selected one."""
    views = sorted(state.run.ranks, key=lambda view: view.rank) if state.run else []
    lines_of: set[int | None] = {view.rank for view in views}
    together: tuple[Trace, ...] = ()
    if len(views) > MAX_LINES:
        all_of_them = series.combined([state.window(metric, view.rank) for view in views])
        together = (Trace(all_of_them, "mean", "label", band="band"),)
        slow = state.run.straggler if state.run else None
        lines_of = {selected, slow.rank if slow is not None else None}
    tracks = tuple(_track(state, metric, views, index) for index, view in enumerate(views) if view.rank in lines_of)
    return Plot(title, (*together, *tracks), *_range(state), marks=of_run(state), min_span=0.2, max_times=max_times)


def _track(state: ViewState, metric: str, views: Sequence[RankView], index: int) -> Trace:
    view = views[index]
    several = sum(other.node == view.node for other in views) > 1
    name = shorten(clean(view.node), 10) + (f":{view.rank}" if several else "")
    role, letter = rank_role(index), string.ascii_lowercase[index % 26] if state.lettered else ""
    return Trace(series.means(state.window(metric, view.rank)), name, role, letter=letter)


def _range(state: ViewState) -> tuple[int, int]:
    return 1, window_end(state.run.step, state.run.steps or 0) if state.run else 2


_NOTHING: tuple[tuple[int, int], list[Line]] = (0, 0), []


class OverviewScreen(TableScreen):
    """One run on one page."""

    TABLE = table_schemas.FLEET
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "choose(1)", "next node", show=False),
        Binding("up,k", "choose(-1)", "previous node", show=False),
        Binding("enter", "app.node", "open the node", show=False, tooltip="the chosen node in full"),
        Binding("right", "open_node(True)", "open a node", show=False, tooltip="a row for each rank"),
        Binding("left", "open_node(False)", "close a node", show=False, tooltip="one row for the node"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._charts = ChartCache()
        self.opened: frozenset[str] = frozenset()
        self._ready = _NOTHING  # drawn in parts, to be shown

    @property
    def wanted(self) -> fleet_table.Arrangement:
        """Return the fleet table as it was filtered, sorted and opened."""
        owner, bar = self.owner, self.bar
        bar.table = table_schemas.fleet(owner.shown.own_metrics)
        return fleet_table.Arrangement(bar.filter, self.order, self.opened, owner.fleet_metrics, bar.table)

    def painting(self) -> Iterator[None]:
        """Return each part of the page by itself, and all of them shown together at the end; given up where the screen
        is painted meanwhile, which is newer."""
        columns, rows = self.size
        if self.is_whole and too_small(columns, rows) is None:
            room, number = (columns, self._body_rows()), self.paints
            made: list[Line] = []
            for part in self._parts(*room):
                made += part
                yield
                if not self.is_whole or self.paints != number:
                    return
            self._ready = room, made
        self.paint()
        yield

    def lines(self, columns: int, rows: int) -> list[Line]:
        (room, drawn), self._ready = self._ready, _NOTHING
        if room != (columns, rows):
            drawn = [pieces for part in self._parts(columns, rows) for pieces in part]
        return drawn

    def _parts(self, columns: int, rows: int) -> Iterator[list[Line]]:
        owner = self.owner
        self.filter_rows(self._rows() if self.bar.rows else [])
        return parts(
            owner.shown,
            owner.clock,
            columns,
            rows,
            selected=owner.selected,
            badge=owner.badge,
            address=owner.address,
            cache=self._charts,
            wanted=self.wanted,
        )

    def _rows(self) -> list[Row]:
        return rows(self.owner.shown, self.owner.clock, self.owner.selected)

    @property
    def _chosen(self) -> Row | None:
        return next((row for row in self._rows() if row.selected), None)

    def sort_fields(self) -> Sequence[str]:
        return fleet_table.sortable(self.owner.shown, self.owner.clock, self.size.width, self.owner.fleet_metrics)

    def action_choose(self, by: int) -> None:
        """Move the choice among the rows; dialogs start from the chosen one."""
        rank = fleet_table.rank_at(fleet_table.arranged(self._rows(), self.wanted), by)
        if rank is not None:
            self.owner.selected = rank
        self.paint()

    def action_open_node(self, wide: bool) -> None:
        """Open the chosen node into its ranks, or closes it."""
        row = self._chosen
        if row is not None:
            self.opened = self.opened | {row.view.node} if wide else self.opened - {row.view.node}
            self.paint()

    def action_toggle_node(self, rank: int) -> None:
        """Open or close a node of several ranks that was clicked."""
        node = next((row.view.node for row in self._rows() if row.view.rank == rank), "")
        self.opened ^= {node}
        self.paint()

    def values(self) -> Values:
        """Return what `y` copies of the chosen node, or else of the run."""
        row, node = self._chosen, self.owner.shown.node
        if row is None:
            return super().values()
        rate = f"{row.own_rate:.1f}" if row.own_rate is not None else ""
        address = node.address if node is not None and node.node == row.view.node else ""
        pid = str(row.view.pid) if row.view.pid is not None else ""
        texts = ("address", address), ("own tok/s", rate), ("pid", pid), ("why", row.view.why)
        return (("node", row.view.node), *((name, text) for name, text in texts if text), *super().values())
