"""The Textual side of the pure lines: widgets that repaint only cells that changed, and tell what the mouse does."""

import abc
from collections.abc import Iterator, Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from trainctl.tui.text.styled_line import Line, Piece, cell_len, merged, plain, width
from trainctl.tui.widgets.theme import style_of

_APART = 12
"""Unchanged cells from which on two changes are painted apart; moving the cursor costs about that."""


def changed_spans(old: Line, new: Line) -> list[tuple[int, int]]:
    """Return first cell and number of cells of each stretch where two lines differ; all of it with wide characters."""
    if old == new:
        return []
    was, text = plain(old), plain(new)
    if len(was) != len(text) or cell_len(was) != len(was) or cell_len(text) != len(text):
        return [(0, max(cell_len(was), cell_len(text)))]
    lead = _alike(old, new)
    start = len(plain(old[:lead]))
    old, new = old[lead:], new[lead:]
    end = _alike(old[::-1], new[::-1])
    before, after = _cells(old[: len(old) - end]), _cells(new[: len(new) - end])
    spans: list[tuple[int, int]] = []
    for index in (start + place for place, cell in enumerate(before) if cell != after[place]):
        if spans and index - sum(spans[-1]) < _APART:
            spans[-1] = (spans[-1][0], index - spans[-1][0] + 1)
        else:
            spans.append((index, 1))
    return spans


def _alike(one: Line, other: Line) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _cells(pieces: Line) -> list[tuple[str, str, str]]:
    """Return what is seen in each cell; a blank looks the same in every role."""
    return [(char, role if char != " " else "", action) for text, role, action in pieces for char in text]


_MOST_LOOKS = 1024
"""Roles and clicks whose styles are kept; past that they are made again."""


class Lines(Widget):
    """Shows lines as they are given; `show` repaints no more than what differs from what is there."""

    DEFAULT_CSS = "Lines { height: 1fr; width: 1fr; }"

    def __init__(self, *, id: str | None = None, grow: bool = False) -> None:
        super().__init__(id=id)
        self._grow = grow
        self._lines: list[Line] = []
        self._ground: Style | None = None
        self._looks: dict[tuple[str, str], Style] = {}

    @property
    def shown(self) -> list[str]:
        """Return the text on each line, for tests and for copying."""
        return [plain(pieces) for pieces in self._lines]

    def show(self, lines: Sequence[Line]) -> None:
        """Replace the lines. With `grow` the widget is as tall as they are."""
        old, self._lines = self._lines, [merged(pieces) for pieces in lines]
        if len(old) != len(self._lines):
            if self._grow:
                self.styles.height = max(len(self._lines), 1)
            self.refresh(layout=self._grow)
            return
        regions = []
        for row, (before, after) in enumerate(zip(old, self._lines, strict=True)):
            regions += [Region(start, row, size, 1) for start, size in changed_spans(before, after)]
        if regions:
            self.refresh(*regions)

    def render_line(self, y: int) -> Strip:
        pieces = self._lines[y] if y < len(self._lines) else ()
        if self._ground is None:
            self._ground = Style(bgcolor=self.rich_style.bgcolor)
        ground = self._ground
        segments = [self._segment(piece, ground) for piece in pieces]
        return Strip(segments, width(pieces)).adjust_cell_length(self.size.width, ground)

    def _segment(self, piece: Piece, ground: Style) -> Segment:
        style = self._looks.get(piece[1:])
        if style is None:
            style = ground + style_of(piece.role, self.app.theme)
            if piece.action:
                style += Style.from_meta({"@click": piece.action})
            if len(self._looks) > _MOST_LOOKS:
                self._looks.clear()
            self._looks[piece[1:]] = style
        return Segment(piece.text, style)

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._ground = None
        self._looks.clear()
        self.refresh()


class Repaintable:
    """A part that the program's `paint` brings up to date: screens, and dialogs that show the present state."""

    @abc.abstractmethod
    def paint(self) -> None:
        """Show the present state."""

    def painting(self) -> Iterator[None]:
        """Draw the present state in parts, between which others may have a turn."""
        self.paint()
        yield


class ChartArea(Lines):
    """Lines that post what the mouse does on them, in cells from their upper left corner."""

    class Pointed(Message):
        """The mouse moved, or was pressed."""

        def __init__(self, column: int, row: int, *, pressed: bool = False) -> None:
            super().__init__()
            self.column, self.row, self.pressed = column, row, pressed

        def can_replace(self, message: Message) -> bool:
            """Return whether another move replaces this one: only the last of many counts."""
            return isinstance(message, ChartArea.Pointed) and not message.pressed and not self.pressed

    class Wheeled(Message):
        """The wheel turned: `by` is -1 upwards, 1 downwards."""

        def __init__(self, by: int, column: int, row: int) -> None:
            super().__init__()
            self.by, self.column, self.row = by, column, row

    class Dragged(Message):
        """The mouse moved by `columns` with its button down."""

        def __init__(self, columns: int) -> None:
            super().__init__()
            self.columns = columns

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button and event.delta_x:
            self.post_message(self.Dragged(event.delta_x))
        elif not event.button:
            self.post_message(self.Pointed(event.x, event.y))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.button == 1 and not event.style.meta.get("@click"):
            self.capture_mouse()
            self.post_message(self.Pointed(event.x, event.y, pressed=True))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Wheeled(-1, event.x, event.y))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Wheeled(1, event.x, event.y))
