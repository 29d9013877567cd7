"""The view of the Charts screen as one immutable value, and the pure reducer of its keys.

The range is kept in steps whatever stands on the x axis; it zooms and pans evenly on that axis.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from trainctl.tui.charts.axis import KINDS, Axis, Kind

ALL_RANKS: Final = -1
MAX_CHARTS: Final = 8
MIN_STEPS: Final = 8.0
"""No view is narrower."""
SMOOTHINGS: Final = (0.0, 0.01, 0.04, 0.16)
"""Half-lives of the smoothed line, as parts of the steps in view; 0 is none."""
_ZOOM, _PAN = 2.0, 0.25


@dataclass(frozen=True)
class Pick:
    """A metric to draw: of the run (`rank` None), of one rank, or of each (ALL_RANKS)."""

    metric: str
    rank: int | None = None


@dataclass(frozen=True)
class Chart:
    """One chart of the stack: its lines, and how its y axis and lines are drawn."""

    picks: tuple[Pick, ...]
    log: bool = False
    smoothing: float = 0.0  # one of SMOOTHINGS


@dataclass(frozen=True)
class ChartView:
    """`span` None shows the whole run, `last` None goes with its newest step; both are in steps."""

    charts: tuple[Chart, ...]
    x: Kind = "step"
    span: float | None = None
    last: float | None = None
    crosshair: float | None = None  # a step, not whole
    focus: int = 0
    alone: bool = False  # only the chart in focus is drawn
    runs: tuple[str, ...] = ()  # those laid over the one shown

    @property
    def chart(self) -> Chart:
        """Return the chart in focus."""
        return self.charts[self.focus]

    @property
    def following(self) -> bool:
        return self.last is None


def window_end(newest: int, total: int) -> int:
    """Return where a chart's x axis ends: it fills up, then jumps on by an eighth to a quarter, so it seldom moves, and
    four fifths or more are filled from the second step on.

    At most `total` steps when that is known, 2 at least.
    """
    size = 2
    while size < newest:
        size *= 2
    end = next(value for value in (size * part // 8 for part in (5, 6, 7, 8)) if value >= max(newest, 2))
    return min(end, total) if total >= max(newest, 2) else end


def page(newest: int, steps: int) -> tuple[int, int]:
    """Return first and last step of a view of about `steps` steps that moves on by quarters."""
    quarter = max(steps // 4, 1)
    last = max(-(-newest // quarter), 4) * quarter
    return last - 4 * quarter + 1, last


@dataclass(frozen=True)
class Extent:
    """The ground of a view: the run's newest step, how many it is to have (0: not known), whether more come, and the
    columns and the axis that it is drawn with."""

    newest: int
    total: int = 0
    live: bool = True
    columns: int = 100
    axis: Axis = field(default_factory=Axis)

    @property
    def whole(self) -> tuple[float, float]:
        """Return first and last step of the view that shows everything."""
        return 1.0, float(window_end(self.newest, self.total) if self.live else max(self.newest, 2))


def shown(view: ChartView, extent: Extent) -> tuple[float, float]:
    """Return first and last step in view."""
    first, last = extent.whole
    if view.span is None:
        return first, last
    if view.last is not None:
        return view.last - view.span + 1, view.last
    if not extent.live:
        return max(extent.newest - view.span + 1, 1.0), float(max(extent.newest, 2))
    begin, end = page(extent.newest, round(view.span))
    return float(begin), float(end)


def half_life(chart: Chart, view: ChartView, extent: Extent) -> float:
    """Return the half-life of a chart's smoothed line, in steps rounded to 1, 2 or 5 times a power of ten; 0 for
    none."""
    if not chart.smoothing:
        return 0.0
    first, last = shown(view, extent)
    wanted, unit = max((last - first + 1) * chart.smoothing, 1.0), 1.0
    while unit * 10 <= wanted:
        unit *= 10
    return next(unit * part for part in (5, 2, 1) if unit * part <= wanted)


def zoomed(view: ChartView, factor: float, extent: Extent, at: float | None = None) -> ChartView:
    """Return the view of `factor` times the range around step `at`, or else the crosshair, or else the newest step or
    the middle. Zooming in and out again by the same returns, as long as neither met a limit."""
    first, last = shown(view, extent)
    size = last + 1 - first
    if factor < 1 and size * factor < MIN_STEPS:
        return view
    at = view.crosshair if at is None else at
    if at is None or not first <= at <= last + 1:
        if view.following:
            return _following(view, size * factor, extent)
        at = (first + last + 1) / 2
    x = extent.axis.to_x
    middle, low, high = float(x(at)), float(x(first)), float(x(last + 1))
    edges = [float(extent.axis.to_step(middle + (edge - middle) * factor)) for edge in (low, high)]
    if factor < 1 and edges[1] - edges[0] < MIN_STEPS / 2:  # in time, on a pause
        return view
    return _over(view, edges[0], edges[1], extent)


def _following(view: ChartView, span: float, extent: Extent) -> ChartView:
    first, last = extent.whole
    return replace(view, span=None if span >= last + 1 - first else span, last=None)


def _over(view: ChartView, start: float, end: float, extent: Extent) -> ChartView:
    """Return the view from `start` up to `end`, moved into the whole range; all of that is the view of everything."""
    first, last = extent.whole
    if end - start >= (last + 1 - first) * (1 - 1e-9):
        return replace(view, span=None, last=None)
    move = max(first - start, 0.0) + min(last + 1 - end, 0.0)
    return replace(view, span=end - start, last=end + move - 1)


def panned(view: ChartView, part: float, extent: Extent) -> ChartView:
    """Return the view moved by a part of its own range; to the right of the newest step it goes with that again."""
    if view.span is None:
        return view
    first, last = shown(view, extent)
    x = extent.axis.to_x
    by = part * float(x(last + 1) - x(first))
    start, end = (float(extent.axis.to_step(float(x(edge)) + by)) for edge in (first, last + 1))
    if end - start < MIN_STEPS / 2:  # in time, onto a pause: over it
        start, end = first + part * (last + 1 - first), last + 1 + part * (last + 1 - first)
    if part > 0 and end > extent.newest + 1:
        return replace(view, span=last + 1 - first, last=None)
    return _over(view, start, end, extent)


def crossed(view: ChartView, by: int, extent: Extent) -> ChartView:
    """Return the crosshair `by` columns on, or `by` steps where those are wider; it begins at the newest step in
    view."""
    first, last = shown(view, extent)
    if view.crosshair is None:
        return replace(view, crosshair=float(min(max(extent.newest, first), last)))
    x = extent.axis.to_x
    low, high = float(x(first)), float(x(last + 1))
    moved = float(extent.axis.to_step(float(x(view.crosshair)) + by * (high - low) / max(extent.columns, 1)))
    if abs(moved - view.crosshair) < 1:
        moved = int(view.crosshair) + by
    return replace(view, crosshair=min(max(moved, first), last + 0.999))


def pointed(view: ChartView, part: float, extent: Extent) -> ChartView:
    """Return the crosshair at a part (0 to 1) of the chart's width."""
    return replace(view, crosshair=step_at(view, part, extent))


def step_at(view: ChartView, part: float, extent: Extent) -> float:
    """Return the step at a part (0 to 1) of the chart's width."""
    first, last = shown(view, extent)
    low, high = (float(extent.axis.to_x(edge)) for edge in (first, last + 1))
    return float(extent.axis.to_step(low + min(max(part, 0.0), 1.0) * (high - low)))


def focused(view: ChartView, by: int) -> ChartView:
    return replace(view, focus=(view.focus + by) % len(view.charts))


def with_chart(view: ChartView, chart: Chart) -> ChartView:
    """Return the view with another chart in the place of the one in focus."""
    return replace(view, charts=(*view.charts[: view.focus], chart, *view.charts[view.focus + 1 :]))


def _added(view: ChartView) -> ChartView:
    if len(view.charts) >= MAX_CHARTS:
        return view
    place = view.focus + 1
    return replace(view, charts=(*view.charts[:place], Chart(()), *view.charts[place:]), focus=place)


def _removed(view: ChartView) -> ChartView:
    if len(view.charts) < 2:
        return view
    left = (*view.charts[: view.focus], *view.charts[view.focus + 1 :])
    return replace(view, charts=left, focus=min(view.focus, len(left) - 1))


def _reset(view: ChartView) -> ChartView:
    """Return the view without its crosshair, or if it has none without its zoom."""
    if view.crosshair is not None:
        return replace(view, crosshair=None)
    return replace(view, span=None, last=None, alone=False)


def _smoothed(view: ChartView) -> ChartView:
    place = SMOOTHINGS.index(view.chart.smoothing) if view.chart.smoothing in SMOOTHINGS else 0
    return with_chart(view, replace(view.chart, smoothing=SMOOTHINGS[(place + 1) % len(SMOOTHINGS)]))


def _home(view: ChartView, extent: Extent) -> ChartView:
    first, last = shown(view, extent)
    return view if view.span is None else _over(view, 1.0, last + 2 - first, extent)


ACTIONS: Final[dict[str, Callable[[ChartView, Extent], ChartView]]] = {
    "zoom_in": lambda view, extent: zoomed(view, 1 / _ZOOM, extent),
    "zoom_out": lambda view, extent: zoomed(view, _ZOOM, extent),
    "cross_left": lambda view, extent: crossed(view, -1, extent),
    "cross_right": lambda view, extent: crossed(view, 1, extent),
    "pan_left": lambda view, extent: panned(view, -_PAN, extent),
    "pan_right": lambda view, extent: panned(view, _PAN, extent),
    "first": _home,
    "newest": lambda view, _: replace(view, last=None),
    "log": lambda view, _: with_chart(view, replace(view.chart, log=not view.chart.log)),
    "axis": lambda view, _: replace(view, x=KINDS[(KINDS.index(view.x) + 1) % len(KINDS)]),
    "smooth": lambda view, _: _smoothed(view),
    "next": lambda view, _: focused(view, 1),
    "previous": lambda view, _: focused(view, -1),
    "alone": lambda view, _: replace(view, alone=not view.alone),
    "add": lambda view, _: _added(view),
    "remove": lambda view, _: _removed(view),
    "reset": lambda view, _: _reset(view),
}
"""Changes of the view by keys, under the names that their bindings have."""
