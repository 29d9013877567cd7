"""Node: one node in detail, with its log."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import History, HistoryRequest, RunView
from trainctl.tui.charts.history import MAX_COLUMNS
from trainctl.tui.screens import node_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.screens.log_view import Named, View, names_of
from trainctl.tui.screens.logs import LogScreen
from trainctl.tui.state import step_phases
from trainctl.tui.state.rank_rows import Row, rows
from trainctl.tui.state.source import Source
from trainctl.tui.text.styled_line import Line, Piece, filled, fit, line


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
        body, left = node_view.lines(owner.shown, row, self.past, owner.clock, columns, rows - 1)
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
