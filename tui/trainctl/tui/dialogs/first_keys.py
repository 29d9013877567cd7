"""The keys that the first start shows, once."""

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from trainctl.tui.dialogs.popup import CLOSES, Popup
from trainctl.tui.text.styled_line import Line, Piece, line


class FirstKeysScreen(Popup[None]):
    """Keys to begin with, each with what it does. Any other key closes it too, and then acts on the screen below."""

    DEFAULT_CSS = "FirstKeysScreen #dialog { width: 48; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("enter", "close", "close", priority=True)]

    def __init__(self, keys: Sequence[tuple[str, str]]) -> None:
        super().__init__("five keys to begin with")
        self._keys = keys

    def on_key(self, key: events.Key) -> None:
        key.stop()
        self.dismiss()
        self.app.post_message(events.Key(key.key, key.character))

    def text(self) -> list[Line]:
        return [(), *(line(Piece(f"{key:>5}  ", "key"), words) for key, words in self._keys), (), CLOSES]
