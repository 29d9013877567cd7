"""The head of a table that can be sorted: a click on a title sorts by it, and an arrow says which way it is sorted."""

from trainctl.tui.state.sorting import SortOrder
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Piece


def title(field: str, text: str, size: int, order: SortOrder, glyphs: Glyphs, *, right: bool = False) -> Piece:
    """A title in `size` cells, flush right or left, with the arrow of the column that is sorted by; `field` is empty
    for a column that nothing is sorted by."""
    arrow = order.arrow(field, glyphs.up, glyphs.down)
    text = f"{arrow}{text}".rjust(size) if right else f"{text[: size - len(arrow)]}{arrow}".ljust(size)
    return Piece(text[:size], "strong" if arrow else "label", f"screen.sort({field!r})" if field else "")
