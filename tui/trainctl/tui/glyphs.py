"""The characters the screen draws with: Unicode, and the ASCII that stands in where the locale cannot show it."""

import locale
import os
import sys
from dataclasses import dataclass


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
    letters: bool = False


UNICODE = Glyphs(
    False, "─", "│", "┬", "┊", "╎", "×", "→", "↑", "↓", "→", "·", "…", "▇", "▁▂▃▄▅▆▇█", "◆", "✕", "▸", "▾"
)  # fmt: skip
ASCII = Glyphs(
    True, "-", "|", "+", ":", "!", "x", "->", "+", "-", "=", ".", "~", "#", "_.-=+*#@", "o", "X", ">", "v", letters=True
)

_PLAIN = str.maketrans(
    {
        **dict(zip("─│┬┼┊╎×↑↓·…▇◆✕▸▾°•–—’‘“”µ", "-|++:!x^v.~#oX>v *--''\"\"u", strict=True)),
        **{"→": "->", "≥": ">=", "≤": "<="},
    }
)


def to_ascii(text: str) -> str:
    """Text with every character in ASCII, as many cells as before where that is possible; the rest become `?`."""
    return text if text.isascii() else text.translate(_PLAIN).encode("ascii", "replace").decode("ascii")


def for_locale() -> Glyphs:
    """Unicode where the locale's encoding can carry it, else ASCII.

    Python takes the C locale for UTF-8: it says so in its own encoding, and unless LC_ALL forbids it in LC_CTYPE too.
    """
    by_itself = sys.flags.utf8_mode and "PYTHONUTF8" not in os.environ
    if by_itself and (os.environ.get("LC_ALL") or os.environ.get("LANG")) in ("C", "POSIX"):
        return ASCII
    encoding = locale.getencoding().lower().replace("-", "").replace("_", "")
    return UNICODE if encoding in ("utf8", "utf8sig", "utf16", "utf32") else ASCII
