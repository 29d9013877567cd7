"""A screen with a table: `/` filters it, `o` and `O` sort it, esc clears the filter."""

import abc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input

from trainctl.tui.commands.context import context_of
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.state import filter_language, table_fields
from trainctl.tui.state.filter_language import TypedLineError
from trainctl.tui.state.table_fields import Table
from trainctl.tui.text.styled_line import Line, Piece, clean, ellipsized, fit, folded, line, spread, width
from trainctl.tui.widgets.fields import InputField
from trainctl.tui.widgets.line_view import Lines

_MOST_SAID = 3
"""Rows of what is said about a filter."""


class FilterBar(Vertical):
    """The line in which a filter is typed, under remarks about it; one row while a filter is in effect, otherwise none.
    A filter that can't be understood says why, and the one before stays in effect."""

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
        except TypedLineError as error:
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


R = TypeVar("R")
_WHILE_TYPING = frozenset({"filter", "sort_next", "sort_reverse"})


class TableScreen(BaseScreen):
    """A body whose rows are filtered and sorted. `TABLE` has the fields; `hidden` and `total` count what the filter in
    effect hides, set by `lines`."""

    TABLE: ClassVar[Table[Any]]
    NEEDED = (*BaseScreen.NEEDED, "#filter-note")
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/", tooltip="show only matching rows", priority=True),
        Binding("o", "sort_next", "sort", show=False, tooltip="sort by the next column", priority=True),
        Binding("O", "sort_reverse", "reverse", show=False, tooltip="reverse the order", priority=True),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.order = table_fields.SortOrder()
        self.hidden = self.total = 0

    def between(self) -> Iterable[Widget]:
        yield FilterBar(self.TABLE)

    @property
    def bar(self) -> FilterBar:
        return self.query_one(FilterBar)

    def rows_between(self) -> int:
        return self.bar.rows

    def paint(self) -> None:
        super().paint()
        if self.is_whole:
            self.bar.paint(self.hidden, self.total)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return whether an action may run now: these keys are text while something is typed."""
        return action not in _WHILE_TYPING or not isinstance(self.focused, Input)

    def filter_rows(self, every: Sequence[R]) -> list[R]:
        """Return the rows that the filter keeps, and count them."""
        kept = self.bar.filter.kept(every)
        self.total, self.hidden = len(every), len(every) - len(kept)
        return kept

    def on_filter_bar_changed(self) -> None:
        self.paint()

    def action_filter(self) -> None:
        self.bar.start()
        self.paint()

    def action_back(self) -> None:
        if self.bar.rows:
            self.bar.clear()
            self.paint()
        else:
            super().action_back()

    @abc.abstractmethod
    def sort_fields(self) -> Sequence[str]:
        """Return what `o` goes through."""

    def action_sort_next(self) -> None:
        self.order = table_fields.next_order(self.order, self.sort_fields())
        self.paint()

    def action_sort_reverse(self) -> None:
        self.order = replace(self.order, falling=not self.order.falling)
        self.paint()

    def action_sort(self, field: str) -> None:
        """Sort by a column whose head was clicked."""
        self.order = table_fields.order_by(self.order, field)
        self.paint()


class RowsScreen(TableScreen, Generic[R]):
    """A table in which one row is always chosen: the first, where the chosen one isn't among them."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.rows: list[R] = []
        self.chosen_key: object = None

    @abc.abstractmethod
    def row_key(self, row: R) -> object:
        """Return what the row is chosen by."""

    def arrange_rows(self, every: Sequence[R]) -> None:
        """Set the rows to be shown, filtered and sorted."""
        self.rows = table_fields.in_order(self.filter_rows(every), self.order, self.TABLE)

    @property
    def cursor(self) -> int:
        """Return where the chosen row is."""
        return next((at for at, row in enumerate(self.rows) if self.row_key(row) == self.chosen_key), 0)

    def action_move(self, by: int) -> None:
        self.action_pick(min(max(self.cursor + by, 0), len(self.rows) - 1))

    def action_pick(self, index: int) -> None:
        """Choose a row that was clicked."""
        if 0 <= index < len(self.rows):
            self.chosen_key = self.row_key(self.rows[index])
        self.paint()
