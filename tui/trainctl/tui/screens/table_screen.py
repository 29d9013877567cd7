"""A screen with a table: `/` filters it, `o` and `O` sort it, esc clears the filter."""

import abc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.state import table_fields
from trainctl.tui.state.table_fields import Table
from trainctl.tui.widgets.filter_bar import FilterBar

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
