"""The order of a table's rows: by one of its fields, either way, or the order they come in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from trainctl.tui.state.filter_fields import Table
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Piece

R = TypeVar("R")


@dataclass(frozen=True)
class SortOrder:
    """`field` is empty for the table's own order."""

    field: str = ""
    falling: bool = False

    def arrow(self, field: str, up: str, down: str) -> str:
        """What a column's head carries: the way it is sorted, nothing for another column."""
        return "" if not field or field != self.field else down if self.falling else up


def turned(order: SortOrder, fields: Sequence[str]) -> SortOrder:
    """By the next of `fields`, and after the last one in the table's own order."""
    at = fields.index(order.field) + 1 if order.field in fields else 0
    return SortOrder(fields[at]) if at < len(fields) else SortOrder()


def reversed_(order: SortOrder) -> SortOrder:
    return SortOrder(order.field, not order.falling)


def picked(order: SortOrder, field: str) -> SortOrder:
    """By a column's head: first rising, then falling, then the table's own order again."""
    if order.field != field:
        return SortOrder(field)
    return SortOrder() if order.falling else SortOrder(field, falling=True)


def in_order(rows: Sequence[R], order: SortOrder, table: Table[R]) -> list[R]:
    """The rows in that order; equal ones keep theirs, and what is unknown comes last either way."""
    field = table.find(order.field) if order.field else None
    if field is None:
        return list(reversed(rows)) if order.falling else list(rows)
    keyed = [(field.sort_key(row), row) for row in rows]
    known = [item for item in keyed if item[0][0] < 2]
    known.sort(key=lambda item: item[0], reverse=order.falling)
    return [row for _, row in known] + [row for key, row in keyed if key[0] == 2]


def column_title(field: str, text: str, size: int, order: SortOrder, glyphs: Glyphs, *, right: bool = False) -> Piece:
    """A title in `size` cells, flush right or left, with the arrow of the column that is sorted by; `field` is empty
    for a column that nothing is sorted by."""
    arrow = order.arrow(field, glyphs.up, glyphs.down)
    text = f"{arrow}{text}".rjust(size) if right else f"{text[: size - len(arrow)]}{arrow}".ljust(size)
    return Piece(text[:size], "strong" if arrow else "label", f"screen.sort({field!r})" if field else "")
