"""The characters the screen draws with: Unicode, and the ASCII that stands in where the locale cannot show it."""

import locale
import os
import sys
from dataclasses import dataclass

from rich.cells import split_graphemes


@dataclass(frozen=True)
class Glyphs:
    """One set of drawing characters. `ascii_only` also switches the charts' cells; with `letters` each line of a chart
    carries its node's, for where colours don't tell them apart."""

    ascii_only: bool
    horizontal: str
    vertical: str
    tee: str
    mark: str
    change: str
    times: str
    arrow: str
    up: str
    down: str
    level: str
    dot: str
    ellipsis: str
    block: str
    sparks: str
    point: str
    nonfinite: str
    cursor: str
    opened: str
    child: str
    letters: bool = False

    def text(self, text: str) -> str:
        """Return text from elsewhere with the characters that can be shown, before it is measured and laid out."""
        return to_ascii(text) if self.ascii_only else text


UNICODE = Glyphs(
    False, "─", "│", "┬", "┊", "╎", "×", "→", "↑", "↓", "→", "·", "…", "▇", "▁▂▃▄▅▆▇█", "◆", "✕", "▸", "▾", "└"
)
ASCII = Glyphs(
    True, "-", "|", "+", ":", "!", "x", "->", "+", "-", "=", ".", "~", "#", "_.-=+*#@", "o", "X", ">", "v", "`", True
)

_ALIKE = {
    **dict(zip("─│┬┼┊╎×↑↓·…▇◆✕▸▾°•–—’‘“”µ←⏎±▌▐█", "-|++:!x^v.~#oX>v *--''\"\"u<+~||#", strict=True)),
    **dict.fromkeys("▀▁▂▃▄▅▆▉▊▋▍▎▏▔▕", " "),  # ends of scroll bars and edges
}
_SHORT = str.maketrans({**_ALIKE, "→": ">", "≥": ">", "≤": "<", "🔎": "> "})
_PLAIN = str.maketrans({**_ALIKE, "→": "->", "≥": ">=", "≤": "<=", "±": "+-"})
_WHOLE = {"⏎": "enter", "←": "left", "→": "right", "↑": "up", "↓": "down", "⌫": "bksp"}


def to_ascii(text: str) -> str:
    """Return text with every character in ASCII, an arrow or a comparison in two; the rest become `?`."""
    return text if text.isascii() else text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")


def in_same_cells(text: str) -> str:
    """Return text with every character in ASCII and as many cells as before: of what is laid out already nothing
    moves."""
    if text.isascii():
        return text
    made = []
    for start, end, cells in split_graphemes(text)[0]:
        sign = text[start:end].translate(_SHORT)
        made.append(sign if sign.isascii() and len(sign) == cells else "?" * cells)
    return "".join(made)


def key_in_ascii(display: str) -> str:
    """Return a key's name as it is printed, in words where it is a sign."""
    return "".join(_WHOLE.get(char, char) for char in display) if not display.isascii() else display


def for_locale() -> Glyphs:
    """Return Unicode where the locale's encoding can carry it, else ASCII.

    Python takes the C locale for UTF-8: it says so in its own encoding, and unless LC_ALL forbids it in LC_CTYPE too.
    """
    by_itself = sys.flags.utf8_mode and "PYTHONUTF8" not in os.environ
    if by_itself and (os.environ.get("LC_ALL") or os.environ.get("LANG")) in ("C", "POSIX"):
        return ASCII
    encoding = locale.getencoding().lower().replace("-", "").replace("_", "")
    return UNICODE if encoding in ("utf8", "utf8sig", "utf16", "utf32") else ASCII
