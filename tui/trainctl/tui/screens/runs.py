"""The runs that the cluster knows, to open one or take one up again."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.tui import header, runs_view
from trainctl.tui.lines import Line, rule
from trainctl.tui.screens.base import BaseScreen

RUNS_REFRESH_SECONDS = 5.0


class RunsScreen(BaseScreen):
    """The runs the agent knows; opens one, or takes one up again."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next run", show=False),
        Binding("up,k", "move(-1)", "previous run", show=False),
        Binding("enter", "open", "open"),
        Binding("s", "resume_run", "resume run"),
        Binding("r", "reload", "refresh", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.runs: tuple[m.RunSummary, ...] | None = None
        self.problem = ""
        self.cursor = 0

    def on_mount(self) -> None:
        self.action_reload()
        self.set_interval(RUNS_REFRESH_SECONDS, self.action_reload)

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.action_reload()

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        head = header.lines(owner.live, owner.clock, columns, owner.glyphs, rows=2, badge=owner.badge)[:1]
        title = rule(columns, owner.glyphs.horizontal, (0, f"{owner.glyphs.horizontal} runs ", "title"))
        return [*head, title, *runs_view.lines(
            self.runs, self.cursor, self.problem, owner.live, owner.clock, columns, rows - 2, owner.glyphs
        )]  # fmt: skip

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
        self.cursor = min(self.cursor, max(len(self.runs or ()) - 1, 0))
        self.paint()

    @property
    def chosen(self) -> m.RunSummary | None:
        return self.runs[self.cursor] if self.runs and self.cursor < len(self.runs) else None

    def action_move(self, by: int) -> None:
        self.cursor = min(max(self.cursor + by, 0), max(len(self.runs or ()) - 1, 0))
        self.paint()

    def action_open(self) -> None:
        if self.chosen is not None:
            self.run_worker(self.owner.open_run(self.chosen.run), group="open", exclusive=True)

    def action_resume_run(self) -> None:
        if self.chosen is not None:
            self.owner.open_dialog("start-run", {"resume": self.chosen.run})
