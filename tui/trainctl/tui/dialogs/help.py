"""Help: the keys and words of the screens, and the few keys that the first start shows, once."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import ClassVar

from textual import events
from textual.binding import Binding, BindingType

from trainctl.tui.dialogs.popup import CLOSES, Popup
from trainctl.tui.terminal import guard
from trainctl.tui.text.run_lines import FIGURES, WORDS
from trainctl.tui.text.styled_line import Line, Piece, cell_len, fit, folded, labelled, line, wrap

_HELP_CELLS = 35
_TEXT_CELLS = 2 * _HELP_CELLS
_AROUND_CELLS = 8
"""Columns of the border, the margins and the scroll bar."""
_SHELL = "from a shell  "


def key_rows(keys: Sequence[tuple[str, str]], columns: int = _TEXT_CELLS) -> list[Line]:
    """Return keys and what they do in two columns, or one where two don't fit; words too long for theirs go on
    below."""
    if columns < 2 * _HELP_CELLS:
        return [row for key, what in keys for row in _cell(key, what, columns)]
    cells = [_cell(key, what, _HELP_CELLS) for key, what in keys]
    total = sum(map(len, cells))
    left: list[Line] = []
    while cells and 2 * len(left) < total:
        left += cells.pop(0)
    right = [row for cell in cells for row in cell]
    blank = fit((), _HELP_CELLS)
    return [(*one, *other) for one, other in zip_longest(left, right, fillvalue=blank)]


def _cell(key: str, what: str, columns: int) -> list[Line]:
    head = f"{key:>7}  "
    first, *more = wrap(what, columns - cell_len(head))
    rows = [line(Piece(head, "key"), first), *(line(" " * cell_len(head) + row) for row in more)]
    return [fit(row, columns) for row in rows]


class HelpScreen(Popup[None]):
    """The keys of the screen it was opened from, taken from its live bindings, and what the letters mean."""

    DEFAULT_CSS = "HelpScreen #dialog { width: 78; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("question_mark", "close", "close")]
    SCROLLS_BY_KEYS = True

    def __init__(self, keys: list[tuple[str, str]], address: str) -> None:
        super().__init__("keys")
        self._keys, self._address = keys, address

    def text(self) -> list[Line]:
        columns = min(_TEXT_CELLS, self.app.size.width - _AROUND_CELLS)
        lines = [line(Piece(row, "warning")) for row in wrap(guard.fallback(), columns) if row]
        lines += key_rows(self._keys, columns)
        words = "trainctl send VERB ... --connect " if "://" in self._address else "trainctl replay "
        lines += [(), *(row for meaning in _LEGEND for row in folded(meaning, columns, 2)), ()]
        return lines + labelled(_SHELL, words + self._address, columns)


_LEGEND: tuple[Line, ...] = (
    line(
        Piece("     step  ", "label"),
        Piece("d", "phase_d"),
        " data  ",
        Piece("f", "phase_f"),
        " forward  ",
        Piece("b", "phase_b"),
        " backward  ",
        Piece("s", "phase_s"),
        " sync  ",
        Piece("o", "phase_o"),
        " optimizer  ",
        Piece(".", "phase_wait"),
        " wait",
    ),
    *(line(Piece(f"{figure.label:>9}  ", "label"), figure.meaning) for figure in (*FIGURES, *WORDS)),
)


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
