"""The Charts screen: any metrics of any nodes and runs, zoomed, panned and read at a crosshair, by keys and mouse."""

from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.timer import Timer
from textual.widgets import Input

from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.messages import HistoryRequest, RunSummary, RunView, SnapshotRequest
from trainctl.tui.charts import history, layout, plots, readout
from trainctl.tui.charts.axis import KINDS, Axis, Kind
from trainctl.tui.charts.history import Ask, Key
from trainctl.tui.charts.layout import Drawn, Place
from trainctl.tui.charts.metrics import DEFAULT_CHARTS, charts_of, title
from trainctl.tui.charts.plots import RunData, Sources, plots_of, renamed
from trainctl.tui.charts.viewport import ACTIONS, ChartView, Extent, Pick, focused, panned, pointed, step_at, zoomed
from trainctl.tui.dialogs.chart_picker import MAX_RUNS, ChartPicker, Picker, choices_of, toggled
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.state.series import Window
from trainctl.tui.text.styled_line import Line, Piece, clean, fit, line
from trainctl.tui.widgets.line_view import ChartArea

ASK_AFTER_SECONDS = 0.1
"""A view is asked for when it has stood this long."""
RETRY_SECONDS = 5.0
_HEAD_ROWS = 1
_MARGIN_CELLS = 16  # beside the dots, until it is known


def _key(keys: str, action: str, words: str, tooltip: str = "") -> Binding:
    """Return a chart's key: it has its place on the screen's own line, and acts before the next one of a burst."""
    return Binding(keys, action, words, show=False, tooltip=tooltip, priority=True)


def _is_same(one: object, other: object) -> bool:
    """Return whether nothing has changed; the states' parts are never changed in place."""
    return one is other or (isinstance(one, int | str) and one == other)


class ChartsScreen(BaseScreen):
    """Charts above each other over one x axis. What is drawn follows the view at once; finer data come when the record
    has answered, and until then the old picture stays."""

    BODY = ChartArea
    BINDINGS: ClassVar[list[BindingType]] = [
        _key("plus,equals_sign", "view('zoom_in')", "zoom in", "zoom in at the crosshair"),
        _key("minus", "view('zoom_out')", "zoom out"),
        _key("left", "view('cross_left')", "crosshair left"),
        _key("right", "view('cross_right')", "crosshair right"),
        _key("left_square_bracket,shift+left", "view('pan_left')", "earlier steps"),
        _key("right_square_bracket,shift+right", "view('pan_right')", "later steps"),
        _key("home", "view('first')", "first steps"),
        _key("end", "view('newest')", "newest steps, live"),
        _key("v", "view('log')", "y linear or logarithmic"),
        _key("z", "view('axis')", "x: step, tokens, time"),
        _key("f", "view('smooth')", "smoothing"),
        _key("tab,down,j", "view('next')", "next chart"),
        _key("shift+tab,up,k", "view('previous')", "previous chart"),
        _key("enter", "view('alone')", "only this chart"),
        _key("A", "add", "one more chart"),
        _key("R", "view('remove')", "one fewer chart"),
        _key("m", "pick", "choose metrics, nodes, runs"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.view = ChartView(DEFAULT_CHARTS)
        self.data: dict[str, RunData] = {}
        self._tails: dict[Key, Window] = {}
        self._run = self._branched_off = ""
        self._drawn = Drawn([], ())
        self._shown: tuple[object, ...] = ()
        self._asked: dict[str, tuple[object, ...]] = {}  # by run what was answered last
        self._under_way: dict[str, tuple[object, ...]] = {}
        self._timer: Timer | None = None
        self._problem = ""

    def on_screen_resume(self) -> None:
        self._asked = {}  # what came while it wasn't looked at is asked for
        super().on_screen_resume()

    # ------------------------------------------------------------ what is drawn

    @property
    def sources(self) -> Sources:
        state = self.owner.shown
        return Sources(state, self.data, state.active, self.owner.clock.zone, self._tails)

    @property
    def extent(self) -> Extent:
        return plots.extent(self.view, self.sources, self._drawn.columns or max(self.size.width - _MARGIN_CELLS, 1))

    def lines(self, columns: int, rows: int) -> list[Line]:
        state = self.owner.shown
        self._turn_to(state.run)
        self._compare()
        head = self.head(columns)
        if state.run is None:
            words = line(Piece("no run yet: trainctl run RUN.toml starts one", "dim"))
            return [head, *[fit(words if row == 0 else (), columns) for row in range(rows - _HEAD_ROWS)]]
        self._tails = history.collected(self._tails, state, self.view.charts)
        self._draw(columns, rows - _HEAD_ROWS)
        self._want()
        return [head, *self._drawn.lines]

    def _turn_to(self, run: RunView | None) -> None:
        """Begin another run with nothing known and all of it in view."""
        name = run.run if run is not None else ""
        if name != self._run:
            self._branched_off = run.branch.run if run is not None and run.branch is not None else ""
            runs = tuple(other for other in self.view.runs if other != name) or tuple(
                filter(None, (self._branched_off,))
            )
            self.view = ChartView(charts_of(self.view.charts, run), self.view.x, focus=self.view.focus, runs=runs)
            self._run, self.data, self._tails, self._asked = name, {}, {}, {}
            self._under_way, self._drawn = {}, Drawn([], ())

    def _compare(self) -> None:
        chosen, self.owner.compare_runs = self.owner.compare_runs, ()
        if chosen:
            others = tuple(run for run in chosen if run != self._run)
            self.view = replace(self.view, runs=others[-MAX_RUNS:])

    def _draw(self, columns: int, rows: int) -> None:
        """Draw again only when something that it shows has changed."""
        state = self.owner.shown
        shown = (
            state.windows,
            state.recent,
            state.events,
            state.run,
            self.view,
            self._problem,
            columns,
            rows,
            *self.data.values(),
            *self._tails.values(),
        )
        if len(shown) == len(self._shown) and all(map(_is_same, shown, self._shown)):
            return
        self._shown = shown
        for _ in range(2 if not self._drawn.places else 1):  # at first the columns are a guess
            self._drawn = self._stacked(columns, rows)

    def _stacked(self, columns: int, rows: int) -> Drawn:
        sources, extent = self.sources, self.extent
        wanted = layout.window_of_charts(self.view, rows - layout.READOUT_ROWS - 1)
        drawn = plots_of(self.view, sources, extent, wanted)
        elapsed = bool(self.view.runs)
        axes: dict[Kind, Axis] = {kind: sources.axis(self._run, kind, elapsed=elapsed) for kind in KINDS[1:]}
        notes, shown = readout.notes(sources.state), list(zip(wanted, drawn, strict=True))
        return layout.draw(shown, self.view, extent, axes, notes, columns=columns, rows=rows, status=self._problem)

    # ------------------------------------------------------------ what is asked for

    def _want(self) -> None:
        """Have the record asked for what is in view, once that has stood for a moment and isn't asked for yet."""
        if self._timer is None and any(
            run not in self._under_way or self._under_way[run] != self._identity(ask)
            for run, ask in self._missing().items()
        ):
            self._timer = self.set_timer(ASK_AFTER_SECONDS, self._ask)

    def _missing(self) -> dict[str, Ask]:
        return {run: ask for run, ask in self._asks().items() if self._asked.get(run) != self._identity(ask)}

    def _asks(self) -> dict[str, Ask]:
        """Return by run the request for what is in view; a run laid over that is new is asked for whole first."""
        extent = self.extent
        spans = plots.spans(self.view, self.sources, extent)
        metrics = history.needed(self.view.charts)
        made = {}
        for run, span in spans.items():
            known = self.sources.of(run)
            if known is None or known.coarse is None:
                span = (1.0, float(known.run.step if known is not None else 1))
            newest = known.run.step if known is not None else 1
            made[run] = history.ask_of(run, metrics, span, newest, 2 * extent.columns)
        return made

    def _identity(self, ask: Ask) -> tuple[object, ...]:
        """Return what makes an ask another one: not that the run has gone on while what is new is drawn live."""
        known = self.data.get(ask.run) if ask.run == self._run else None
        fine = known.fine if known is not None else None
        torn = fine is not None and history.is_torn(fine, self.owner.shown, self._tails)
        return ask.metrics, ask.first, ask.end, ask.columns, self.owner.shown.boot, torn

    def _ask(self) -> None:
        self._timer = None
        if not self.is_current and not isinstance(self.app.screen, ChartPicker):
            return
        missing = self._missing()
        self._under_way = {run: self._identity(ask) for run, ask in missing.items()}
        self.run_worker(self._fetch(missing), group="history", exclusive=True)

    async def _fetch(self, asks: dict[str, Ask]) -> None:
        client = self.owner.client
        if client is None:
            self._failed("no agent")
            return
        for run, ask in asks.items():
            try:
                view = await self._view_of(run)
                if view is None:
                    continue
                if run not in self.data and run != self._run:
                    ask = replace(ask, last=max(view.step, 1), end=max(view.step, 1))
                parts = history.parts(ask, len(view.ranks))
                replies = [
                    await client.lead.ask(HistoryRequest, run, part, ask.first, ask.last, ask.columns) for part in parts
                ]
            except TrainctlError as error:
                if run == self._branched_off and isinstance(error, RefusedError | InvalidInputError):  # unknown here
                    self.view = replace(self.view, runs=tuple(other for other in self.view.runs if other != run))
                    continue
                self._failed(str(error))
                return
            self._take(run, view, history.answer_of(ask, replies))
            self._asked[run] = self._identity(ask)
        self._under_way, self._problem = {}, ""
        self.paint()

    async def _view_of(self, run: str) -> RunView | None:
        shown = self.owner.shown.run
        if shown is not None and shown.run == run:
            return shown
        if run in self.data:
            return self.data[run].run
        client = self.owner.client
        return (await client.lead.ask(SnapshotRequest, 0, run)).run if client is not None else None

    def _take(self, run: str, view: RunView, answer: history.Answer) -> None:
        if run != self._run and run not in self.view.runs:
            return
        before = self.data.get(run)
        others = {name: item.run for name, item in self.data.items()}
        if self.owner.shown.run is not None:
            others[self._run] = self.owner.shown.run
        coarse = before.coarse if before is not None and before.coarse is not None else answer
        if answer.ask.first <= 1 and answer.ask.last >= coarse.ask.last:
            coarse = answer
        self.data[run] = RunData(renamed(view, others) if run != self._run else view, coarse, answer)
        self.paint()

    def _failed(self, why: str) -> None:
        self._problem, self._under_way = clean(why), {}
        if self._timer is None:
            self._timer = self.set_timer(RETRY_SECONDS, self._ask)
        self.paint()

    # ------------------------------------------------------------ keys

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action may run: the charts' keys are text while something is typed."""
        return action not in ("view", "pick", "add") or not isinstance(self.focused, Input)

    def action_back(self) -> None:
        """Hide the crosshair, then show all steps, then leave."""
        before = self.view
        self.action_view("reset")
        if self.view == before:
            super().action_back()

    def action_view(self, what: str) -> None:
        self.view = ACTIONS[what](self.view, self.extent)
        self.paint()

    def action_add(self) -> None:
        """Add an empty chart, and open the list to fill it from."""
        before = len(self.view.charts)
        self.action_view("add")
        if len(self.view.charts) > before:
            self.action_pick()

    def action_pick(self) -> None:
        self.run_worker(self._open_picker(), group="picker", exclusive=True)

    async def _open_picker(self) -> None:
        client = self.owner.client
        runs: tuple[RunSummary, ...] = ()
        if client is not None:
            try:
                runs = (await client.runs()).runs
            except TrainctlError as error:
                self._failed(str(error))
        shown = self.owner.shown
        picker = Picker(choices_of(shown.run, runs, shown.own_metrics, shown.own_run_metrics))
        drawn = title(self.view.chart, str, shown.run)
        words = f"chart {self.view.focus + 1} of {len(self.view.charts)}: {drawn}"
        self.app.push_screen(ChartPicker(picker, self.view, words, self._toggled))

    def _toggled(self, what: Pick | str) -> ChartView:
        self.view = toggled(self.view, what)
        for run in set(self.data) - {self._run, *self.view.runs}:
            del self.data[run]
        self.paint()
        return self.view

    # ------------------------------------------------------------ the mouse

    def _place_at(self, column: int, row: int) -> tuple[Place, float] | None:
        """Return the chart under a cell of the body, and how far across its dots that is, 0 to 1."""
        for place in self._drawn.places:
            if place.first_row <= row - _HEAD_ROWS < place.end_row and 0 <= column - place.left < place.columns:
                return place, (column - place.left + 0.5) / place.columns
        return None

    def on_chart_area_pointed(self, message: ChartArea.Pointed) -> None:
        found = self._place_at(message.column, message.row)
        if found is None:
            return
        place, part = found
        self.view = pointed(self.view, part, self.extent)
        if message.pressed:
            self.view = focused(self.view, place.chart - self.view.focus)
        self.paint()

    def on_chart_area_wheeled(self, message: ChartArea.Wheeled) -> None:
        found = self._place_at(message.column, message.row)
        if found is not None:
            at = step_at(self.view, found[1], self.extent)
            self.view = zoomed(self.view, 2.0**message.by, self.extent, at)
            self.paint()

    def on_chart_area_dragged(self, message: ChartArea.Dragged) -> None:
        self.view = panned(self.view, -message.columns / max(self._drawn.columns, 1), self.extent)
        self.paint()
