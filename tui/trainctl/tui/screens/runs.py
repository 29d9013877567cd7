"""The runs that the cluster knows and its nodes: to open a run, take one up again, start or compare them."""

import contextlib
from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import RunSummary, WorksRequest, WorkSummary
from trainctl.tui.commands import forms
from trainctl.tui.commands.context import Values
from trainctl.tui.dialogs.command_dialog import BranchDialog, StartDialog
from trainctl.tui.screens import runs_view
from trainctl.tui.screens.table_screen import RowsScreen
from trainctl.tui.state.table_schemas import RUNS, RunRow
from trainctl.tui.text.formatting import loss
from trainctl.tui.text.run_lines import LAST_LOSS
from trainctl.tui.text.styled_line import Line, filled, rule

RUNS_REFRESH_SECONDS = 5.0
WORK_REFRESH_SECONDS = 1.0
_MOST_NODES = 10
"""Rows for nodes at most, their rule included."""


class RunsScreen(RowsScreen[RunRow]):
    """The runs the agent knows, newest first; one is always chosen."""

    TABLE = RUNS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next run", show=False),
        Binding("up,k", "move(-1)", "previous run", show=False),
        Binding("enter", "open", "open"),
        Binding("s", "resume_run", "resume run"),
        Binding("space", "mark", "mark", tooltip="mark a run to compare"),
        Binding("c", "compare", "compare", tooltip="compare marked runs, or a branch with its parent, in Charts"),
        Binding("N", "start", "new run", tooltip="start a run from a run file"),
        Binding("B", "branch", "branch", show=False, tooltip="start a run from a checkpoint of this one"),
        Binding("r", "reload", "refresh", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.runs: tuple[RunSummary, ...] | None = None
        self.works: tuple[WorkSummary, ...] = ()
        self.problem = ""
        self.marked: frozenset[str] = frozenset()

    @property
    def own_keys(self) -> frozenset[str]:
        return frozenset({"rebalance", "checkpoint"})

    def on_mount(self) -> None:
        self.action_reload()
        self.set_interval(RUNS_REFRESH_SECONDS, self.action_reload)
        self.set_interval(WORK_REFRESH_SECONDS, self._reload_works)

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.action_reload()

    # ------------------------------------------------------------ drawing

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        self.arrange_rows([runs_view.row_of(run, owner.clock) for run in self.runs or ()])
        if not self.order.field:
            self.rows = runs_view.as_tree(self.rows)
        title = f"─ runs: {len(self.rows)} " if self.runs is not None else ""
        drawn = [self.head(columns, owner.live), rule(columns, (0, title, "title"))]
        drawn.append(runs_view.head(columns, self.order, priced=self._priced))
        low = self._low(columns, rows)
        room = max(rows - len(drawn) - len(low), 1)
        body = self._body(columns, room)
        return filled([*drawn, *body, *([()] * (room - len(body))), *low], columns, rows)

    def _body(self, columns: int, room: int) -> list[Line]:
        if self.problem or not self.rows:
            return [runs_view.nothing(self.runs, self.hidden, self.problem)]
        start = min(max(self.cursor - room + 1, 0), max(len(self.rows) - room, 0))
        lines = []
        for index, item in enumerate(self.rows[start : start + room], start):
            here, marked = index == self.cursor, item.run.run in self.marked
            pieces = runs_view.row(item, here, marked, self.owner.clock, columns, priced=self._priced)
            lines.append(tuple(piece._replace(action=f"screen.pick({index})") for piece in pieces))
        return lines

    @property
    def _priced(self) -> bool:
        return any(run.cost is not None for run in self.runs or ())

    def _low(self, columns: int, rows: int) -> list[Line]:
        """Return the chosen run, separate work and the nodes, as far as they leave some rows to the runs."""
        owner = self.owner
        work = runs_view.work(self.works, columns)
        room = min(rows // 2 - 3 - len(work), _MOST_NODES)
        nodes = [*work, *runs_view.nodes(owner.live, self.works, owner.clock, columns, room)]
        chosen = self.chosen
        if chosen is None:
            return nodes
        marked, live = len(self.marked - {chosen.run}) + 1 if self.marked else 0, owner.live
        policies = live.run.policies if live.run is not None and live.run.run == chosen.run else ()
        costs = runs_view.costs(chosen, live, owner.clock, columns)
        return [*runs_view.detail(chosen, marked, columns, policies, costs), *nodes]

    # ------------------------------------------------------------ what there is

    def row_key(self, row: RunRow) -> str:
        return row.run.run

    @property
    def chosen(self) -> RunSummary | None:
        return self.rows[self.cursor].run if self.rows else None

    def sort_fields(self) -> Sequence[str]:
        return runs_view.SORTED_BY

    def values(self) -> Values:
        run = self.chosen
        if run is None:
            return ()
        last = ((LAST_LOSS.label, loss(run.last_loss)),) if run.last_loss is not None else ()
        return (("run", run.run), ("directory", run.directory), ("name", run.name), *last)

    def arrived(self) -> None:
        self.action_reload()

    def action_reload(self) -> None:
        if self.is_current:
            self.run_worker(self._load(), group="runs", exclusive=True)

    async def _load(self) -> None:
        client = self.owner.client
        if client is None:
            return
        try:
            self.runs, self.problem = (await client.runs()).runs, ""
        except TrainctlError as error:
            self.problem = str(error)
        await self._load_works()

    def _reload_works(self) -> None:
        if self.is_current:
            self.run_worker(self._load_works(), group="works", exclusive=True)

    async def _load_works(self) -> None:
        client = self.owner.client
        with contextlib.suppress(TrainctlError):  # the runs say what is wrong
            self.works = (await client.lead.ask(WorksRequest)).works if client is not None else ()
        self.paint()

    # ------------------------------------------------------------ actions

    def action_open(self) -> None:
        if self.chosen is not None:
            self.run_worker(self.owner.open_run(self.chosen.run), group="open", exclusive=True)

    def action_resume_run(self) -> None:
        if self.chosen is not None:
            self.owner.open_dialog("start-run", {"resume": self.chosen.run})

    def action_start(self) -> None:
        self.app.push_screen(StartDialog(forms.start_form()))

    def action_branch(self) -> None:
        if self.chosen is not None:
            self.app.push_screen(BranchDialog(self.chosen.run))

    def action_mark(self) -> None:
        """Mark the chosen run, or unmark it."""
        if self.chosen is not None:
            self.marked ^= {self.chosen.run}
            self.action_move(1)

    def action_compare(self) -> None:
        """Open Charts with the marked runs and the chosen one; without a mark, a branch with its parent."""
        chosen = self.chosen
        wanted = self.marked | ({chosen.run} if chosen is not None else set())
        if not self.marked and chosen is not None and chosen.branch is not None:
            wanted = frozenset({chosen.run, chosen.branch.run})
        if len(wanted) < 2:
            self.app.notify("first press space to mark another run", severity="warning")
            return
        runs = tuple(item.run.run for item in self.rows if item.run.run in wanted)
        self.run_worker(self._compare(runs), group="open", exclusive=True)

    async def _compare(self, runs: tuple[str, ...]) -> None:
        shown = self.owner.shown.run
        if shown is None or shown.run not in runs:
            await self.owner.open_run(runs[0])
            shown = self.owner.shown.run
        if shown is not None and shown.run in runs:
            self.owner.compare_runs = runs
            self.owner.action_show("charts")
