"""The `/` line: a filter as it is typed, what is wrong with it, and how many rows the one in effect hides."""

from typing import Any

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.message import Message
from textual.widgets import Input

from trainctl.tui.commands.context import context_of
from trainctl.tui.state import filter_language
from trainctl.tui.state.table_fields import Table
from trainctl.tui.text.styled_line import Line, Piece, clean, ellipsized, fit, folded, line, spread, width
from trainctl.tui.widgets.fields import InputField
from trainctl.tui.widgets.line_view import Lines

_MOST_SAID = 3
"""Rows of what is said of a filter."""


class FilterBar(Vertical):
    """The line while a filter is typed, under what is to be said of it; one row while one is in effect, none else. What
    can't be understood says why, and the last filter that could stays in effect."""

    DEFAULT_CSS = """
    FilterBar { height: auto; display: none; } FilterBar Lines, FilterBar InputField { height: 1; }
    FilterBar InputField { background: $panel; }
    """

    class Changed(Message):
        """The news that another filter is in effect, or the bar takes more rows or fewer."""

    def __init__(self, table: Table[Any]) -> None:
        super().__init__()
        self.table = table
        self.filter: filter_language.Filter[Any] = filter_language.parse("", table)
        self.problem = ""
        self.typing = False

    @property
    def rows(self) -> int:
        return 1 + len(self._note("")) if self.typing else 1 if self.filter.text else 0

    def compose(self) -> ComposeResult:
        yield Lines(id="filter-note", grow=True)
        yield InputField(id="filter", placeholder="a word, or field<value (fields are listed above)", compact=True)

    def on_mount(self) -> None:
        self.query_one("#filter").display = False

    def start(self) -> None:
        """Open the line, the filter in effect in it."""
        self.typing = True
        self._rearrange()
        self.screen.set_focus(self.query_one("#filter"))

    def clear(self) -> None:
        """End any filter."""
        self.filter, self.problem = filter_language.parse("", self.table), ""
        box = self.query_one("#filter", Input)
        with box.prevent(Input.Changed):
            box.value = ""
        self._close()

    def _close(self) -> None:
        self.typing = False
        if self.screen.focused is self.query_one("#filter"):
            self.screen.set_focus(None)
        self._rearrange()

    def _rearrange(self) -> None:
        self.query_one("#filter").display = self.typing
        self.display = self.rows > 0
        self.post_message(self.Changed())

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if not self.typing:
            return
        try:
            self.filter, self.problem = filter_language.parse(event.value, self.table), ""
        except filter_language.FilterError as error:
            self.problem = str(error)
        self.post_message(self.Changed())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        if not self.problem:
            self._close()

    def key_escape(self, event: events.Key) -> None:
        event.stop()
        self.clear()

    def paint(self, hidden: int, total: int) -> None:
        """Say how many of `total` rows the filter in effect hides."""
        self.query_one("#filter-note", Lines).show(self._note(f"{hidden} of {total} hidden"))

    def _note(self, hidden: str) -> list[Line]:
        columns = self.size.width or context_of(self).size.width
        if self.problem:
            said = line(Piece(clean(self.problem), "bad"))
        elif not self.filter.text:
            said = line(Piece(f"fields: {self.table.names}", "dim"))
        else:
            return [fit(self._effect(hidden, columns), columns)]
        return [fit(row, columns) for row in folded(said, columns, _MOST_SAID)]

    def _effect(self, hidden: str, columns: int) -> Line:
        press = "screen.back"
        right = line(Piece(hidden, "warning"), Piece("  esc", "key", press), Piece(" clears", "label", press))
        text = Piece(clean(self.filter.text), "strong", "screen.filter")
        left = line(Piece("/", "key", "screen.filter"), text)
        if self.typing:
            left = line(Piece("enter", "key"), Piece(" keeps it", "label"))
        return spread(ellipsized(left, columns - width(right) - 1), right, columns)
