"""The Overview: one run on one page."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.tui import overview
from trainctl.tui.lines import Line
from trainctl.tui.screens.base import BaseScreen


class OverviewScreen(BaseScreen):
    """One run on one page."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "choose(1)", "next node", show=False),
        Binding("up,k", "choose(-1)", "previous node", show=False),
        Binding("enter", "app.node", "open the node", show=False, tooltip="the chosen node in full, as 2"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._charts = overview.ChartCache()

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        return overview.lines(
            owner.shown,
            owner.clock,
            columns,
            rows,
            owner.glyphs,
            selected=owner.selected,
            badge=owner.badge,
            address=owner.address,
            cache=self._charts,
        )

    def action_choose(self, by: int) -> None:
        """Moves the choice among the ranks; dialogs start from the chosen one."""
        self.owner.choose(by)
        self.paint()
