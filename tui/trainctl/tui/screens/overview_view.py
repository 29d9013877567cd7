"""The Overview as lines: head, fleet, charts, events, put together for a screen of any size from 60 x 15 up."""

import math
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace

from trainctl.protocol.messages import WRITING, RankView
from trainctl.tui.charts.layout import side_by_side
from trainctl.tui.charts.marks import of_run
from trainctl.tui.charts.plot import Plot
from trainctl.tui.charts.traces import Trace
from trainctl.tui.charts.viewport import window_end
from trainctl.tui.screens import events_table, fleet_table, header
from trainctl.tui.screens.fleet_table import UNARRANGED, Arrangement
from trainctl.tui.state import rank_rows, rank_speed, series
from trainctl.tui.state.rank_rows import BAD_STATES
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import seconds
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, line, rule, shorten
from trainctl.tui.widgets.theme import rank_role, run_role

LEAST_COLUMNS, LEAST_ROWS = 60, 15
MOST_LINES = 6
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
        shown = (state.values, state.events, state.run, state.slow, columns, room, selected)
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


def too_small(columns: int, rows: int) -> str | None:
    """Return what to say instead of a screen that can't be read, or None."""
    if columns >= LEAST_COLUMNS and rows >= LEAST_ROWS:
        return None
    return f"needs {LEAST_COLUMNS}x{LEAST_ROWS}: {columns}x{rows} is too small"


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
    head, fleet, charts, events = layout(columns, rows, fleet_table.row_count(state.run, wanted.opened))
    yield header.lines(state, clock, columns, rows=head, badge=badge, address=address)
    if state.run is None:
        why = clean(state.connection.why) if state.connection.state != "connected" else ""
        nothing = "no run yet: trainctl run RUN.toml starts one" if state.heard_at is not None else "connecting"
        table = [line(Piece(why, "warning") if why else Piece(nothing, "dim"))]
    else:
        total = _with_total(rows, len(state.run.ranks))
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
    if view is None or not view.why or view.state not in rank_speed.SILENT_STATES:
        return None
    since = clock.time_of(view.since_at)
    role = "bad" if view.state in BAD_STATES else "warning"
    return f"{clean(view.node)} {view.state} since {since}: {clean(view.why)}", role


def _straggler(state: ViewState) -> tuple[str, str] | None:
    slow = rank_rows.named_straggler(state)
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
    plot = _by_rank(state, "busy_seconds", "busy seconds by node", selected, most_times=4.0)
    if state.run is None or len(state.run.ranks) < 2:
        return plot
    return replace(plot, traces=(Trace(series.means(state.window("step_seconds")), "step", "dim"), *plot.traces))


def rate_panel(state: ViewState, selected: int | None = None) -> Plot:
    """Return own rates of each rank."""
    return _by_rank(state, "own_tokens_per_second", "own tok/s by node", selected)


def _by_rank(state: ViewState, metric: str, title: str, selected: int | None, most_times: float = math.inf) -> Plot:
    """Return a line for each rank; of more than can be told apart, their span and mean, and the lines of the one that
    the others wait for and of the selected one."""
    views = sorted(state.run.ranks, key=lambda view: view.rank) if state.run else []
    lines_of: set[int | None] = {view.rank for view in views}
    together: tuple[Trace, ...] = ()
    if len(views) > MOST_LINES:
        all_of_them = series.combined([state.window(metric, view.rank) for view in views])
        together = (Trace(all_of_them, "mean", "label", band="band"),)
        slow = rank_rows.named_straggler(state)
        lines_of = {selected, slow.rank if slow is not None else None}
    tracks = tuple(_track(state, metric, views, index) for index, view in enumerate(views) if view.rank in lines_of)
    return Plot(title, (*together, *tracks), *_range(state), marks=of_run(state), least_span=0.2, most_times=most_times)


def _track(state: ViewState, metric: str, views: Sequence[RankView], index: int) -> Trace:
    view = views[index]
    several = sum(other.node == view.node for other in views) > 1
    name = shorten(clean(view.node), 10) + (f":{view.rank}" if several else "")
    role, letter = rank_role(index), string.ascii_lowercase[index % 26] if state.lettered else ""
    return Trace(series.means(state.window(metric, view.rank)), name, role, letter=letter)


def _range(state: ViewState) -> tuple[int, int]:
    return 1, window_end(state.run.step, state.run.steps or 0) if state.run else 2
