"""Node: one node in detail: its facts, its own charts, where its steps went, its memory, and its log."""

import string
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from textual.binding import Binding, BindingType

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import History, HistoryRequest, RunView
from trainctl.tui.charts.history import MAX_COLUMNS
from trainctl.tui.charts.layout import beside, widths
from trainctl.tui.charts.marks import of_run
from trainctl.tui.charts.plot import Block, Plot, draw_panel
from trainctl.tui.charts.traces import Trace
from trainctl.tui.charts.viewport import page
from trainctl.tui.screens import node_facts
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.screens.log_view import Named, View, names_of
from trainctl.tui.screens.logs import LogScreen
from trainctl.tui.state import series, step_phases
from trainctl.tui.state.rank_rows import Row, rows
from trainctl.tui.state.source import Source
from trainctl.tui.state.step_phases import MEAN_STEPS, StepPhases, means
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import percent, seconds
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, fit, from_cells, line, rule, shorten
from trainctl.tui.widgets.inline_bars import BAR_PHASES, in_cells, memory_lines
from trainctl.tui.widgets.theme import rank_role

_TABLE_CELLS, _MEMORY_CELLS = 40, 44
_TWO_CHARTS, _THREE_CHARTS = 76, 116
_MIN_CHART_CELLS = 28
"""Beside means and memory."""
RECENT_CHART_STEPS = 240
"""Steps the charts span."""
ROWS_WITH_VERSIONS = 34
"""Rows from which versions of the rank's libraries are shown: the charts have room beside them."""
PHASE_ROWS = 8
"""Rows of the phases, their rule included."""


def layout(rows: int) -> tuple[int, int]:
    """Return the rows of the charts and of the phases below the facts, rules included; the log has the rest. Without
    rows for both, charts and phases share one."""
    if rows < 24:
        return 0, min(PHASE_ROWS, max(rows - 4, 0))
    return min(max(rows // 3, 8), 16), min(PHASE_ROWS + (rows - 24) // 6, 14)


def node_lines(
    state: ViewState, row: Row, past: step_phases.RecordedPhases, clock: Clock, columns: int, rows: int
) -> tuple[list[Line], int]:
    """Return everything but the head and the log, and how many of `rows` are left for that."""
    compiled = step_phases.compiled(state, past, row.view.rank)
    tall = rows >= ROWS_WITH_VERSIONS
    facts = node_facts.facts(row, state, clock, columns, compiled, with_versions=tall)
    made = [_title(state, row, columns), *facts]
    charts, phases = layout(rows - len(made))
    found = step_phases.laps(state, past, row.view.rank)
    if charts:
        made += beside(_charts(state, row, found, columns, charts - 1), columns, charts - 1)
    if phases > 1:
        blocks = _phases(state, row, found, columns, phases - 1, with_chart=not charts)
        made += beside(blocks, columns, phases - 1)
    return made[:rows], max(rows - len(made), 0)


def _title(state: ViewState, row: Row, columns: int) -> Line:
    views = sorted(view.rank for view in (state.run.ranks if state.run else ()))
    letter = f"{string.ascii_lowercase[row.place % 26]} " if state.lettered else ""
    name = f" {letter}{shorten(clean(row.view.node), columns // 2)} "
    return rule(
        columns,
        (0, "─ node", "title"),
        (6, name, rank_role(row.place)),
        (6 + len(name), f"{row.place + 1} of {len(views)} ", "label"),
    )


def _charts(
    state: ViewState, row: Row, found: Sequence[step_phases.StepPhases], columns: int, rows: int
) -> list[Block]:
    panels = [busy_panel(state, row), rate_panel(state, row), memory_panel(state, row, found)]
    count = 3 if columns >= _THREE_CHARTS else 2 if columns >= _TWO_CHARTS else 1
    sizes = widths(columns, count)
    return [draw_panel(item, size, rows) for item, size in zip(panels, sizes, strict=False)]


def _phases(
    state: ViewState,
    row: Row,
    found: Sequence[step_phases.StepPhases],
    columns: int,
    rows: int,
    *,
    with_chart: bool,
) -> list[Block]:
    """Return the last steps' phases as columns, their means, and memory; on a short screen the speed in place of
    columns, and on a narrow one only means and memory."""
    dash = "─"
    newest = state.run.step if state.run else 0
    sizes = [_TABLE_CELLS] + ([min(_MEMORY_CELLS, columns - _TABLE_CELLS - 1)] if columns >= _TWO_CHARTS else [])
    room = columns - sum(sizes) - len(sizes)
    first: list[Block] = []
    if room < _MIN_CHART_CELLS and len(sizes) > 1:
        room = 0
    elif with_chart:
        first = [draw_panel(busy_panel(state, row), room, rows)]
    elif room >= 20:
        shown = phase_columns(found, newest, room, rows)
        first = [(shown, [(0, f"{dash} phases by step, seconds ", "title")], room)]
    sizes[-1] = columns - sum(sizes[:-1]) - (room + 1 if first else 0) - (len(sizes) - 1)
    table = phase_table(found, sizes[0], rows)
    blocks = [*first, (table, [(0, f"{dash} where a step's time goes ", "title")], sizes[0])]
    if len(sizes) > 1:
        memory = memory_lines(row, sizes[1], rows)
        blocks.append((memory, [(0, f"{dash} memory and disk, GB ", "title")], sizes[1]))
    return blocks


# ---------------------------------------------------------------- the charts


def _span(state: ViewState) -> tuple[int, int]:
    step, steps = (state.run.step, state.run.steps or state.run.step) if state.run else (0, 0)
    return page(step, RECENT_CHART_STEPS) if steps > RECENT_CHART_STEPS else (1, max(steps, 2))


def busy_panel(state: ViewState, row: Row) -> Plot:
    """Return what the rank needs for its part, beside the step that all take."""
    tracks = (
        Trace(state.lately("step_seconds"), "step", "dim", letter="s" if state.lettered else ""),
        Trace(
            state.lately("busy_seconds", row.view.rank),
            "busy",
            rank_role(row.place),
            letter="b" if state.lettered else "",
        ),
    )
    return Plot("busy and step seconds", tracks, *_span(state), marks=of_run(state), min_span=0.2, max_times=4.0)


def rate_panel(state: ViewState, row: Row) -> Plot:
    """Return the rank's rate alone."""
    track = Trace(state.lately("own_tokens_per_second", row.view.rank), "", rank_role(row.place))
    return Plot("own tok/s", (track,), *_span(state), marks=of_run(state), min_span=0.2)


def memory_panel(state: ViewState, row: Row, found: Sequence[step_phases.StepPhases]) -> Plot:
    """Return the peaks of the trainer's memory, in GB."""
    known = [(lap.step, lap.memory_bytes / 1e9) for lap in found if lap.memory_bytes is not None]
    steps = np.array([step for step, _ in known], np.int64)
    values = np.array([value for _, value in known], np.float64)
    ones, none = np.ones(len(known)), np.zeros(len(known), np.int64)
    window = series.Window(1, steps, values, values, values, ones, values, none)
    track = Trace(window, "", rank_role(row.place))
    return Plot(
        "trainer's peak memory, GB", (track,), *_span(state), marks=of_run(state), empty_text="n/a", min_span=0.2
    )


def phase_table(found: Sequence[StepPhases], columns: int, rows: int) -> list[Line]:
    """Return each phase's letter, name, mean and part of the step, in exactly `rows` lines."""
    mean = means(found)
    whole = sum(mean.values())
    lines = []
    for name, letter, role in BAR_PHASES:
        part = mean[name] / whole if mean and whole > 0 else None
        size = max(columns - 29, 0)
        lines.append(
            line(
                Piece(f" {letter} ", role),
                Piece(name.ljust(10), "label"),
                Piece(seconds(mean.get(name)).rjust(7), "text" if mean else "dim"),
                Piece(percent(part).rjust(6) + "  ", "strong" if mean else "dim"),
                Piece("▇" * round(size * (part or 0.0)), role),
            )
        )
    steps = min(len(found), MEAN_STEPS)
    words = f"mean of {steps} steps" if steps > 1 else "of one step" if steps else "no step yet"
    lines.append(
        line(
            Piece("   step      ", "label"),
            Piece(seconds(whole if mean else None).rjust(7), "strong"),
            Piece(f"  {words}", "dim"),
        )
    )
    return filled(lines, columns, rows)


def phase_columns(found: Sequence[StepPhases], newest: int, columns: int, rows: int) -> list[Line]:
    """Return the last steps as columns of phase letters, seconds up, in exactly `rows` lines; a step that isn't known
    is a gap."""
    plot = rows - 1
    if not found or plot < 2 or columns < 20:
        text = line(Piece("  no step yet", "dim"))
        return [fit(text if row == rows // 2 and not found else (), columns) for row in range(rows)]
    lengths = sorted(lap.seconds for lap in found)
    top = min(lengths[-1], 2 * lengths[len(lengths) // 2]) or 1.0  # one far beyond the others runs out of the chart
    labels = {0: seconds(top).replace(" ", ""), plot // 2: seconds(top * (1 - (plot // 2) / plot)).replace(" ", "")}
    gutter = max(len(text) for text in labels.values()) + 1
    first, last = page(newest, columns - gutter)
    by_step = {lap.step: lap for lap in found}
    bars = [_bar(by_step.get(step), top, plot) for step in range(first, last + 1)]
    lines: list[Line] = []
    for row in range(plot):
        cells = [bar[plot - 1 - row] if plot - 1 - row < len(bar) else (" ", "text") for bar in bars]
        label = Piece(labels.get(row, "").rjust(gutter - 1) + " ", "axis")
        lines.append(fit((label, *from_cells(cells)), columns))
    right = f"{last:,}"
    axis = f"{first:,}".ljust(max(len(bars) - len(right), 0)) + right
    lines.append(fit(line(Piece(" " * gutter + axis, "axis")), columns))
    return lines


def _bar(lap: StepPhases | None, top: float, rows: int) -> list[tuple[str, str]]:
    if lap is None or lap.seconds <= 0:
        return []
    lengths = [max(getattr(lap.phases, name), 0.0) for name, *_ in BAR_PHASES]
    counts = in_cells(lengths, max(min(round(rows * lap.seconds / top), rows), 1))
    return [(letter, role) for (_, letter, role), many in zip(BAR_PHASES, counts, strict=True) for _ in range(many)]


class ChosenRankScreen(BaseScreen):
    """Loads more of what it shows when it is opened, and after each attachment."""

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.reload()

    def arrived(self) -> None:
        self.reload()

    def reload(self) -> None:
        """Ask for what the view of the run doesn't have."""

    @property
    def row(self) -> Row | None:
        """Return the rank that is chosen, or the first."""
        owner = self.owner
        table = rows(owner.shown, owner.clock, owner.selected)
        return next((row for row in table if row.selected), table[0] if table else None)

    def action_turn(self, by: int) -> None:
        """Turn to the next node, round the ends."""
        run, row = self.owner.shown.run, self.row
        if run is None or row is None:
            return
        ranks = sorted(view.rank for view in run.ranks)
        self.owner.selected = ranks[(ranks.index(row.view.rank) + by) % len(ranks)]
        self.turned()
        self.paint()

    def turned(self) -> None:
        """Follow the choice of another rank."""


class NodeScreen(ChosenRankScreen, LogScreen):
    """The node of the rank that is chosen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("tab,right", "turn(1)", "next node", key_display="tab", tooltip="next node"),
        Binding("shift+tab,left", "turn(-1)", "previous node", show=False),
        Binding("C", "app.show('calibration')", "calibration", show=False, tooltip="the node's calibration"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.past = step_phases.RecordedPhases()

    def reload(self) -> None:
        """Ask the record for the run's last steps: when it is opened, and after each attachment."""
        self.run_worker(self._load(), group="past", exclusive=True)

    async def _load(self) -> None:
        client, run = self.owner.client, self.owner.shown.run
        if client is None or run is None or not run.step:
            return
        steps = step_phases.columns_of(len(run.ranks))
        span = max(run.step - steps + 1, 0), None, steps
        try:
            history = await client.lead.ask(HistoryRequest, run.run, step_phases.METRICS, *span)
            compiled = await _compiled(client, run)
        except TrainctlError as error:
            self.app.notify(str(error), severity="error", markup=False)
            return
        self.past = step_phases.past_of(run.run, history, compiled)
        self.paint()

    # ------------------------------------------------------------ what is shown

    def names(self) -> dict[int, Named]:
        row = self.row
        return {rank: name for rank, name in names_of(self.owner.shown).items() if row and rank == row.view.rank}

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner, row = self.owner, self.row
        drawn = [self.head(columns)]
        if row is None:
            drawn.append(fit(line(Piece("no run yet, so no nodes: trainctl run RUN.toml starts one", "dim")), columns))
            return filled(drawn, columns, rows)
        body, left = node_lines(owner.shown, row, self.past, owner.clock, columns, rows - 1)
        return [*drawn, *body, *(self.log_lines(columns, left) if left else [])][:rows]

    # ------------------------------------------------------------ keys

    def turned(self) -> None:
        self.view = View(query=self.view.query, only=self.view.only)


async def _compiled(client: Source, run: RunView) -> list[History]:
    """Return what the record has of the compiler's time: over the run, and step by step where it was longest."""
    if not step_phases.is_compiled(run):
        return []
    whole = await client.lead.ask(
        HistoryRequest, run.run, (step_phases.COMPILE_METRIC,), 1, None, step_phases.COMPILE_BUCKETS
    )
    found = step_phases.longest_compilation(step_phases.compiled_by_rank([whole]).values())
    if found is None or found.first == found.last:
        return [whole]
    span = found.first, found.last, min(found.last - found.first + 1, MAX_COLUMNS)
    return [whole, await client.lead.ask(HistoryRequest, run.run, (step_phases.COMPILE_METRIC,), *span)]
