"""The box of lines over a screen that dialogs share, one that scrolls, and one in which one of a few is chosen."""

import abc
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widget import Widget

from trainctl.tui.commands.context import AppContext, KeyHint, context_of
from trainctl.tui.commands.forms import Progress
from trainctl.tui.text.styled_line import Line, Piece, fit, folded, key_words, line
from trainctl.tui.widgets.line_view import Lines

POPUP_CELLS = 70
"""Columns of text in a popup of full width."""
SIDES = 6
"""Columns of a dialog's border and its padding."""
T = TypeVar("T")
CLOSE = KeyHint("esc", "close", "screen.close", "escape")
SEND = KeyHint("enter", "send", "screen.send", "enter")


CLOSES = key_words("esc", "closes", "screen.close")


class Dialog(ModalScreen[T]):
    """A titled box of lines over a screen. Escape closes it, and so does the command that it sent, once applied."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 55%; }
    Dialog:ansi { background: transparent; }
    Dialog #dialog { width: 76; max-width: 100%; height: auto; max-height: 100%; padding: 0 2; border: round $accent;
      border-title-color: $accent; border-title-style: bold; background: $surface; }
    Dialog VerticalScroll { height: auto; max-height: 100%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close", priority=True)]
    CELLS = POPUP_CELLS
    """Columns of text where there is room."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._box_title = title
        self.progress: Progress | None = None

    @property
    def watching(self) -> bool:
        """Return whether a person sees how the command that was sent is doing."""
        return self._is_there and self.is_mounted and self.is_current

    def follow(self, progress: Progress) -> None:
        """Show how far the command has come. One that was applied needs no reader any more."""
        self.progress = progress
        if self.watching and progress.applied:
            self.action_close()
        elif self.watching:
            self.refresh_text()

    @property
    def owner(self) -> AppContext:
        return context_of(self)

    @property
    def cells(self) -> int:
        """Return columns that the text has."""
        return min(self.CELLS, self.app.size.width - SIDES)

    @property
    def _is_there(self) -> bool:
        """Return whether its lines are: a key can come before them, and after they are gone."""
        return bool(self.query("#dialog-text"))

    def compose(self) -> ComposeResult:
        box = Vertical(id="dialog")
        box.border_title = self._box_title
        with box:
            yield from self.content()

    def content(self) -> Iterable[Widget]:
        """Return what is in the box."""
        yield Lines(id="dialog-text", grow=True)

    def on_mount(self) -> None:
        self.refresh_text()

    def refresh_text(self) -> None:
        """Show what `text` gives now."""
        if self._is_there:
            self.query_one("#dialog-text", Lines).show(self.text())

    @abc.abstractmethod
    def text(self) -> list[Line]:
        """Return the lines, at most `cells` wide."""

    def on_resize(self) -> None:
        self.refresh_text()

    def action_close(self) -> None:
        self.dismiss()


class Popup(Dialog[T]):
    """A dialog that scrolls, for reading; q closes it too."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q", "close", "close", priority=True)]
    SCROLLS_BY_KEYS = False

    def content(self) -> Iterable[Widget]:
        yield VerticalScroll(*super().content(), can_focus=self.SCROLLS_BY_KEYS)


class Chooser(Popup[int]):
    """One of up to nine lines, by its number, by up, down and enter, or a click; gives its index, None for none."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next", show=False, priority=True),
        Binding("up,k", "move(-1)", "previous", show=False, priority=True),
        Binding("enter", "take", "take", priority=True),
        *(Binding(digit, f"pick({int(digit) - 1})", digit, show=False, priority=True) for digit in "123456789"),
    ]

    def __init__(self, title: str, choices: Sequence[str], verb: str) -> None:
        super().__init__(title)
        self.choices, self._verb, self.cursor = tuple(choices[:9]), verb, 0

    def text(self) -> list[Line]:
        lines = [row for index in range(len(self.choices)) for row in self._rows_of(index)]
        return [(), *lines, (), (*key_words("enter", f"or a number {self._verb}  "), *key_words("esc", "closes"))]

    def hints(self) -> list[KeyHint]:
        """Return what its keys do, for the bottom line."""
        return [KeyHint("enter", "take", "screen.take", "enter"), CLOSE]

    def _rows_of(self, index: int) -> list[Line]:
        press, role = f"screen.pick({index})", "cursor" if index == self.cursor else "text"
        texts = folded(line(Piece(self.choices[index], role, press)), self.cells - 3, 2)
        heads = (f" {index + 1} ", "   ")
        rows = [
            fit((Piece(head, "key", press), *text), self.cells, role) for head, text in zip(heads, texts, strict=False)
        ]
        return [tuple(piece._replace(action=press) for piece in row) for row in rows]

    def action_move(self, by: int) -> None:
        self.cursor = min(max(self.cursor + by, 0), len(self.choices) - 1)
        self.refresh_text()

    def action_pick(self, index: int) -> None:
        if index < len(self.choices):
            self.dismiss(index)

    def action_take(self) -> None:
        self.action_pick(self.cursor)
