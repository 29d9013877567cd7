"""Logs: what all the trainers of a run print, merged by time."""

from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.tui.screens import log_view as lv
from trainctl.tui.screens.log_screen import LogScreen
from trainctl.tui.text.styled_line import Line

SHIFT_CELLS = 20


class LogsScreen(LogScreen):
    """The logs of all nodes, newest line last."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "shift(1)", "right", show=False),
        Binding("left", "shift(-1)", "left", show=False),
    ]

    def names(self) -> dict[int, lv.Named]:
        return lv.names_of(self.owner.shown)

    def lines(self, columns: int, rows: int) -> list[Line]:
        return [self.head(columns), *self.log_lines(columns, rows - 1)]

    def action_shift(self, by: int) -> None:
        """Moves along lines that are longer than the screen."""
        self.view = replace(self.view, shift=max(self.view.shift + by * SHIFT_CELLS, 0))
        self.paint()
