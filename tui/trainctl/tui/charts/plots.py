"""The charts of a view as plots, from the run's state and what its record answered. Pure."""

import datetime
import itertools
import string
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec

from trainctl.protocol.messages import RunView
from trainctl.tui.charts.axis import Axis, Kind, Scale, continued
from trainctl.tui.charts.history import Answer, Key, axis_for, window_of
from trainctl.tui.charts.marks import of_run
from trainctl.tui.charts.metrics import in_units, rank_names, short, style_of, title
from trainctl.tui.charts.plot import Plot
from trainctl.tui.charts.traces import Trace
from trainctl.tui.charts.viewport import ALL_RANKS, Chart, ChartView, Extent, Pick, half_life, shown
from trainctl.tui.state.series import Window
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.styled_line import clean, shorten
from trainctl.tui.widgets.theme import rank_role, run_role

NAME_CELLS = 12


@dataclass(frozen=True)
class RunData:
    """The data of one run: its view, and answers for the whole of it and for what is in view.

    `coarse` is kept for the axes and until finer data come.
    """

    run: RunView
    coarse: Answer | None = None
    fine: Answer | None = None

    @property
    def answers(self) -> list[Answer]:
        return [answer for answer in (self.fine, self.coarse) if answer is not None]


@dataclass(frozen=True)
class Sources:
    """All that charts are made of: the state shown, and by run what records answered, the runs laid over it too."""

    state: ViewState
    data: Mapping[str, RunData] = field(default_factory=lambda: MappingProxyType({}))
    live: bool = True  # `state` is of a run that still trains
    zone: datetime.tzinfo | None = None
    tails: Mapping[Key, Window] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, run: str) -> RunData | None:
        known = self.data.get(run)
        if known is None and self.state.run is not None and self.state.run.run == run:
            return RunData(self.state.run)
        return known

    def axis(self, run: str, kind: Kind, *, elapsed: bool) -> Axis:
        """Return a run's axis, or that of its steps if the record has none. With `elapsed`, a branch continues
        its parent's from the fork if the parent is known too."""
        known = self.of(run)
        if known is None or kind == "step":
            return Axis()
        live = self.state if self.state.run is not None and self.state.run.run == run and self.live else None
        own, branch = axis_for(kind, known.coarse, known.fine, live, elapsed=elapsed), known.run.branch
        if not elapsed or branch is None or not own.known:
            return own
        others = {name: data for name, data in self.data.items() if name != run}  # no run is its own ancestor
        parent = replace(self, data=others).axis(branch.run, kind, elapsed=True)
        return continued(own, parent, branch.step) if parent.kind == kind and parent.known else own


def extent(view: ChartView, sources: Sources, columns: int) -> Extent:
    """Return what the view lies on. Runs laid over it reach as far as the longest, on an axis of steps."""
    run = sources.state.run
    if run is None:
        return Extent(0, columns=columns)
    axis = sources.axis(run.run, view.x, elapsed=bool(view.runs))
    if not axis.known:
        axis = Axis()
    others = [known.run.step for other in view.runs if (known := sources.of(other)) is not None]
    if view.x != "step":
        others = [_as_far(sources, run.run, other, view) for other in view.runs]
    newest = max([run.step, *others])
    live = sources.live and newest == run.step
    return Extent(newest, (run.steps or 0) if live else 0, live, columns, axis)


def _as_far(sources: Sources, run: str, other: str, view: ChartView) -> int:
    known = sources.of(other)
    theirs, ours = (sources.axis(name, view.x, elapsed=True) for name in (other, run))
    if known is None or not theirs.known or not ours.known:
        return 0
    return int(ours.to_step(theirs.to_x(known.run.step)))


def spans(view: ChartView, sources: Sources, place: Extent) -> dict[str, tuple[float, float]]:
    """Return by run the steps of it that are in view."""
    run = sources.state.run
    if run is None:
        return {}
    first, last = shown(view, place)
    made = {run.run: (first, last)}
    for other in view.runs:
        axis = sources.axis(other, view.x, elapsed=True)
        own = place.axis if axis.known else Axis()
        axis = axis if axis.known else Axis()
        made[other] = (float(axis.to_step(own.to_x(first))), float(axis.to_step(own.to_x(last + 1))) - 1)
    return made


def plots_of(view: ChartView, sources: Sources, place: Extent, wanted: Collection[int]) -> list[Plot]:
    """Return the view's charts of these indices as plots, in order."""
    first, last = shown(view, place)
    marks = of_run(sources.state)
    plots = []
    for index in wanted:
        chart = view.charts[index]
        styles = [style_of(pick.metric) for pick in chart.picks]
        plots.append(
            Plot(
                _titled(chart, view, sources, place),
                traces(chart, view, sources, place),
                first,
                last,
                place.axis,
                Scale(chart.log),
                half_life(chart, view, place),
                marks,
                view.crosshair,
                index == view.focus and len(view.charts) > 1,
                zone=sources.zone,
                empty_text="no values in view",
                with_axis=index == max(wanted),
                min_span=max((style.min_span for style in styles), default=0.02),
                max_times=max((style.max_times for style in styles), default=float("inf")),
            )
        )
    return plots


def _titled(chart: Chart, view: ChartView, sources: Sources, place: Extent) -> str:
    words = [title(chart, lambda rank: _node(sources.state.run, rank), sources.state.run)]
    if chart.log:
        words.append("log")
    soft = half_life(chart, view, place)
    if soft:
        words.append(f"half-life {soft:,.0f} steps")
    return ", ".join(words)


def traces(chart: Chart, view: ChartView, sources: Sources, place: Extent) -> tuple[Trace, ...]:
    """Return a chart's lines: those of the run shown first, each run's picks in their order."""
    run = sources.state.run
    if run is None:
        return ()
    reach = spans(view, sources, place)
    lines = [
        (known, pick)
        for name in (run.run, *view.runs)
        if (known := sources.of(name)) is not None
        for pick in expanded(chart, known.run)
    ]
    several = len({pick.metric for _, pick in lines if pick.rank is not None}) > 1
    made = []
    of_ranks, of_runs = itertools.count(), itertools.count()
    for index, (known, pick) in enumerate(lines):
        own = sources.state if known.run.run == run.run else None
        style = style_of(pick.metric)
        window = window_of(known.answers, own, (pick.metric, pick.rank), reach[known.run.run], sources.tails)
        axis = sources.axis(known.run.run, view.x, elapsed=bool(view.runs)) if place.axis.kind != "step" else Axis()
        label = name_of(pick, known.run, several, bool(view.runs), own is None) if len(lines) > 1 else ""
        role = run_role(next(of_runs)) if pick.rank is None else rank_role(next(of_ranks))
        made.append(
            Trace(
                in_units(window, style.factor),
                shorten(clean(label), NAME_CELLS),
                role,
                axis,
                style.points,
                string.ascii_letters[index % 52] if sources.state.lettered else "",
                pick.metric,
                sparse=style.sparse,
            )
        )
    return tuple(trace for trace in made if len(trace.window) or not trace.points)


def expanded(chart: Chart, run: RunView) -> list[Pick]:
    """Return the picks of a chart with every rank of the run by itself."""
    made: list[Pick] = []
    for pick in chart.picks:
        ranks = sorted(view.rank for view in run.ranks) if pick.rank == ALL_RANKS else [pick.rank]
        made += [Pick(pick.metric, rank) for rank in ranks]
    return list(dict.fromkeys(made))


def _node(run: RunView | None, rank: int) -> str:
    return rank_names(run).get(rank, f"rank {rank}")


def name_of(pick: Pick, run: RunView, several: bool, overlaid: bool, other: bool) -> str:
    """Return what a line is called at its end: what tells it from the chart's other lines."""
    words = [run.name] if overlaid and other else []
    words += [_node(run, pick.rank)] if pick.rank is not None else []
    words += [short(pick.metric)] if pick.rank is None or several else []
    return " ".join(words)


def renamed(run: RunView, others: Mapping[str, RunView]) -> RunView:
    """Return a run of the same name as another goes by the last part of its id, which differs even within a day."""
    if any(other.run != run.run and other.name == run.name for other in others.values()):
        return msgspec.structs.replace(run, name=run.run.rpartition("-")[2] or run.run)
    return run
