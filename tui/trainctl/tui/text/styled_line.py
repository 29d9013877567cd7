"""A line of the screen as plain data: pieces of text with a role, measured and cut in terminal cells.

A role says what a piece means ("good", "phase_forward"); widgets/theme.py says how that looks. Nothing here knows
Textual.
"""

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len as _cell_len
from rich.cells import chop_cells, set_cell_size


class Piece(NamedTuple):
    """Text in one role; a click on it runs `action` (a Textual action such as `app.dialog('pause')`)."""

    text: str
    role: str = "text"
    action: str = ""


Line = tuple[Piece, ...]


def line(*parts: Piece | str) -> Line:
    """Return pieces and plain strings as one line; empty texts vanish."""
    pieces = [Piece(part) if isinstance(part, str) else part for part in parts]
    return tuple([piece for piece in pieces if piece.text])


def key_words(key: str, words: str, action: str = "") -> Line:
    """Return a key and what it does; a click on either does it."""
    return line(Piece(key, "key", action), Piece(f" {words}" if words else "", "label", action))


def clean(text: str) -> str:
    """Return text from elsewhere made safe to print: control characters, escape sequences' included, become spaces."""
    return text if text.isprintable() else "".join(char if char.isprintable() else " " for char in text)


def one_line(text: str) -> str:
    """Return text from elsewhere on one line, safe to print."""
    return " ".join(clean(text).split())


def plain(pieces: Iterable[Piece]) -> str:
    """Return the line's text."""
    return "".join([text for text, _, _ in pieces])


_NARROW = re.compile(
    "[ -~\u00a0-\u02ff\u0370-\u0482\u048a-\u052f\u2010-\u2027\u2030-\u205e\u2190-\u2199\u2500-\u25fc\u2800-\u28ff]*"
).fullmatch
"""Text of characters that take one cell each for certain: letters, dashes, arrows, lines, blocks and braille."""


def is_narrow(text: str) -> bool:
    """Return whether each character is known to take one cell."""
    return _NARROW(text) is not None


def cell_len(text: str) -> int:
    """Return the terminal cells that the text takes; measured often, and nearly all of it is narrow."""
    return len(text) if text.isascii() or _NARROW(text) else _cell_len(text)


def width(pieces: Sequence[Piece]) -> int:
    """Return the terminal cells that the line takes."""
    whole = plain(pieces)
    return len(whole) if is_narrow(whole) else sum([_cell_len(text) for text, _, _ in pieces])


def crop(pieces: Sequence[Piece], columns: int) -> Line:
    """Return at most `columns` cells; a wide character cut in half becomes a space."""
    return _cut(pieces, columns)[0]


def _cut(pieces: Sequence[Piece], columns: int) -> tuple[Line, int]:
    whole = "".join([piece[0] for piece in pieces])
    if len(whole) <= columns and is_narrow(whole):  # as nearly always: measured in one go
        return tuple(pieces), columns - len(whole)
    kept: list[Piece] = []
    left = max(columns, 0)
    for piece in pieces:
        if left == 0:
            break
        text = piece[0]
        size = len(text) if text.isascii() or _NARROW(text) else _cell_len(text)
        if size > left:
            piece, size = piece._replace(text=_resized(text, left)), left
        kept.append(piece)
        left -= size
    return tuple(kept), left


def shorten(text: str, columns: int) -> str:
    """Return at most `columns` cells of text, ending in `…` where something was cut."""
    if cell_len(text) <= columns:
        return text
    if columns <= 1:
        return _resized(text, columns) if columns > 0 else ""
    return _resized(text, columns - 1).rstrip() + "…"


def _resized(text: str, columns: int) -> str:
    return text[:columns] if is_narrow(text) else set_cell_size(text, columns)


def ellipsized(pieces: Sequence[Piece], columns: int) -> Line:
    """Return at most `columns` cells of the line, ending in `…` where something was cut."""
    if width(pieces) <= columns or not pieces:
        return tuple(pieces)
    kept = crop(pieces, columns - 1)
    return (*kept, Piece("…", kept[-1].role if kept else "text"))


def folded(pieces: Sequence[Piece], columns: int, most: int) -> list[Line]:
    """Return the line over one to `most` rows of at most `columns` cells, broken at spaces where there are such; the
    last row ends in `…` where something was cut."""
    rows: list[Line] = []
    rest = tuple(pieces)
    while len(rows) < most - 1 and width(rest) > columns > 0:
        text = plain(rest)
        whole = len(chop_cells(text, columns)[0])
        space = text.rfind(" ", 0, whole + 1)
        row, rest = split(rest, space if space > 0 else whole)
        rows.append(row)
        text = plain(rest)
        rest = split(rest, len(text) - len(text.lstrip(" ")))[1]
    return [*rows, ellipsized(rest, columns)]


def split(pieces: Sequence[Piece], count: int) -> tuple[Line, Line]:
    """Return the first `count` characters of a line, and the others."""
    before: list[Piece] = []
    after: list[Piece] = []
    for piece in pieces:
        before.append(piece._replace(text=piece.text[:count]))
        after.append(piece._replace(text=piece.text[count:]))
        count = max(count - len(piece.text), 0)
    return line(*before), line(*after)


def fit(pieces: Sequence[Piece], columns: int, role: str = "text") -> Line:
    """Return exactly `columns` cells: cut, or filled with spaces of `role`."""
    cut, missing = _cut(pieces, columns)
    return (*cut, Piece(" " * missing, role)) if missing else cut


def filled(lines: Sequence[Line], columns: int, rows: int) -> list[Line]:
    """Return exactly `rows` lines of `columns` cells: the lines as far as there is room, then blank ones."""
    return [fit(lines[row] if row < len(lines) else (), columns) for row in range(rows)]


def pad_left(pieces: Sequence[Piece], columns: int) -> Line:
    """Return exactly `columns` cells, the text at the right end."""
    missing = columns - width(pieces)
    return (Piece(" " * missing), *pieces) if missing > 0 else crop(pieces, columns)


def spread(left: Sequence[Piece], right: Sequence[Piece], columns: int) -> Line:
    """Return `left` at the start and `right` at the end of `columns` cells; the right side goes first when both don't
    fit."""
    used = width(left) + width(right)
    if used + 1 > columns:
        return fit(left, columns)
    return (*left, Piece(" " * (columns - used)), *right)


def groups(parts: Iterable[Sequence[Piece]], columns: int, gap: str = "  ") -> Line:
    """Return as many of the groups, in order, as fit whole in `columns` cells, with `gap` between them."""
    pieces: list[Piece] = []
    used = 0
    for part in parts:
        size = width(part)
        if not size:
            continue
        lead = gap if pieces else ""
        if used + len(lead) + size > columns:
            break
        if lead:
            pieces.append(Piece(lead))
        pieces.extend(part)
        used += len(lead) + size
    return tuple(pieces)


def flowed(parts: Iterable[Sequence[Piece]], columns: int, gap: str = "  ") -> list[Line]:
    """Return all groups, in order, in lines of at most `columns` cells, with `gap` between those of a line; a group
    that is longer is cut."""
    rows: list[Line] = []
    for part in parts:
        if not width(part):
            continue
        if rows and width(rows[-1]) + len(gap) + width(part) <= columns:
            rows[-1] = (*rows[-1], Piece(gap), *part)
        else:
            rows.append(crop(part, columns))
    return rows


def rule(columns: int, *labels: tuple[int, str, str]) -> Line:
    """Return a horizontal rule; each label is (first cell, text, role), later labels win where they meet."""
    cells: list[tuple[str, str]] = [("─", "rule")] * max(columns, 0)
    for start, text, role in labels:
        for offset, char in enumerate(text):
            if 0 <= start + offset < columns:
                cells[start + offset] = (char, role)
    return from_cells(cells)


def from_cells(cells: Iterable[tuple[str, str]]) -> Line:
    """Return single characters with roles, neighbours of one role joined."""
    pieces: list[Piece] = []
    text, current = "", ""
    for char, role in cells:
        if role != current and text:
            pieces.append(Piece(text, current))
            text = ""
        text, current = text + char, role
    return (*pieces, Piece(text, current)) if text else tuple(pieces)


def merged(pieces: Iterable[Piece]) -> Line:
    """Return the same cells in fewer pieces: neighbours of one look joined, blanks taken into the piece before them."""
    cells: list[Piece] = []
    texts: list[str] = []
    last_role, last_action = "", ""  # of the piece that `texts` make up
    for text, role, action in pieces:
        if (
            texts
            and last_action == action
            and (last_role == role or (last_role != "cursor" != role and not action and text.isspace()))
        ):
            texts.append(text)
        elif text:
            if texts:
                cells.append(Piece("".join(texts), last_role, last_action))
            texts, last_role, last_action = [text], role, action
    return (*cells, Piece("".join(texts), last_role, last_action)) if texts else ()


def labelled(name: str, text: str, columns: int, role: str = "text") -> list[Line]:
    """Return a text from elsewhere under a name at its left, wrapped to `columns` cells in all."""
    rows = wrap(clean(text), max(columns - len(name), 10))
    return [line(Piece(name if not at else " " * len(name), "label"), Piece(row, role)) for at, row in enumerate(rows)]


def wrap_lines(text: str, columns: int) -> list[str]:
    """Return a text's own lines in rows of at most `columns` cells. One that fits stays as it is; a longer one is
    broken at spaces, and what continues it begins where it does."""
    rows: list[str] = []
    for line in text.expandtabs(4).splitlines() or [""]:
        shown = clean(line).rstrip()
        if cell_len(shown) <= columns:
            rows.append(shown)
            continue
        indent = " " * min(len(shown) - len(shown.lstrip()), (columns - 1) // 2)
        rows += [indent + row for row in wrap(shown, max(columns - len(indent), 1))]
    return rows


def wrap(text: str, columns: int) -> list[str]:
    """Return text broken at spaces into rows of at most `columns` cells; a word too long is broken anywhere."""
    rows: list[str] = []
    row = ""
    for word in text.split():
        for part in chop_cells(word, columns) or [word]:  # of no width at all: one part
            joined = f"{row} {part}" if row else part
            if cell_len(joined) <= columns:
                row = joined
            else:
                rows.append(row)
                row = part
    return [*rows, row] if row or not rows else rows
