"""Text in ASCII, for terminals without UTF-8: everything is drawn in Unicode, and translated where it is written."""

import locale
import os
import sys


def _braille() -> dict[int, str]:
    """Each cell of a chart by its dots: in the upper half, in the lower half, or in both."""
    upper, lower = 0b00011011, 0b11100100  # Unicode chart "Braille Patterns"
    cells = {}
    for dots in range(1, 256):
        cells[0x2800 + dots] = ":" if dots & upper and dots & lower else "'" if dots & upper else "."
    return cells


_ALIKE = (
    str.maketrans(
        {
            **dict(
                zip(
                    "─│┬┼└┘╭╮╰╯┊╎╪━×↑↓·…◆✕▸▾▶‖●°•–—’‘“”µ←⏎±≤≥→",
                    "-|++`'++++:!+=x^v.~oX>v>=O *--''\"\"u<+~<>>",
                    strict=True,
                )
            ),
            **dict(zip("▁▂▃▄▅▆▇█", "_.-=+*##", strict=True)),
            **dict.fromkeys("▀▉▊▋▍▎▏▔▕", " "),  # edges
            **dict(zip("▌▐", "||", strict=True)),
            "🔎": "> ",
        }
    )
    | _braille()
)
_WHOLE = str.maketrans({"→": "->", "≥": ">=", "≤": "<=", "±": "+-"})
_KEYS = {"⏎": "enter", "←": "left", "→": "right", "↑": "up", "↓": "down", "⌫": "bksp"}


def to_ascii(text: str) -> str:
    """Return text with every character in ASCII, an arrow or a comparison in two; the rest become `?`."""
    if text.isascii():
        return text
    return text.translate(_WHOLE).translate(_ALIKE).encode("ascii", "replace").decode("ascii")


def in_same_cells(text: str) -> str:
    """Return text with every character in ASCII and as many terminal cells as before, so that nothing laid out
    moves."""
    translated = text.translate(_ALIKE)
    if translated.isascii():
        return translated
    from rich.cells import split_graphemes  # slow to import, and hardly ever needed

    signs = []
    for start, end, cells in split_graphemes(text)[0]:
        sign = text[start:end].translate(_ALIKE)
        signs.append(sign if sign.isascii() and len(sign) == cells else "?" * cells)
    return "".join(signs)


def key_in_ascii(display: str) -> str:
    """Return a key's name as it is printed, in words where it is a sign."""
    return "".join(_KEYS.get(char, char) for char in display)


def locale_is_ascii() -> bool:
    """Return whether the locale's encoding can't carry Unicode.

    Python takes the C locale for UTF-8: it says so in its own encoding, and unless LC_ALL forbids it in LC_CTYPE too.
    """
    by_itself = sys.flags.utf8_mode and "PYTHONUTF8" not in os.environ
    if by_itself and (os.environ.get("LC_ALL") or os.environ.get("LANG")) in ("C", "POSIX"):
        return True
    encoding = locale.getencoding().lower().replace("-", "").replace("_", "")
    return encoding not in ("utf8", "utf8sig", "utf16", "utf32")
