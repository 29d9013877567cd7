"""Pictures of screens: as text, which tests compare and a diff shows, and as SVG, which docs/operating.md shows.

The text begins with a picture's size and its most frequent style. Each row of the screen follows behind a `|`,
and below it stand the columns, counted from 0, of each other style in it. A style without a background has that of the
most frequent one.
"""

import io
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

ATTRIBUTES: Final = ("bold", "dim", "italic", "underline", "reverse", "strike")
LINES: Final = ("underline", "reverse", "strike")
"""Attributes that are visible on a blank."""

Cells = list[tuple[str, Style]]
"""A row of the screen: each character with its style."""


def as_text(rows: Iterable[Iterable[Segment]], columns: int) -> str:
    """Return the screen's rows as the text of a picture."""
    screen = [_cells(row) for row in rows]
    background, _ = Counter(style.bgcolor for row in screen for _, style in row).most_common(1)[0]
    words = Counter(style for row in screen for char, style in row if char != " " and style.bgcolor == background)
    default = words.most_common(1)[0][0] if words else Style(bgcolor=background)
    lines = [f"{columns}x{len(screen)} {default}"]
    for row in screen:
        lines.append("|" + "".join(char for char, _ in row).rstrip())
        spans: dict[Style, list[str]] = {}
        for style, first, end in _runs(row):
            if style not in (default, Style(bgcolor=background)):
                spans.setdefault(style, []).append(f"{first}-{end - 1}" if end - first > 1 else f"{first}")
        lines += [f"  {_name(style, background)}: {' '.join(columns)}" for style, columns in spans.items()]
    return "\n".join(lines) + "\n"


def _name(style: Style, background: Color | None) -> str:
    """Return a style's words, without the background if it is the picture's."""
    if style.bgcolor == background:
        return str(Style(color=style.color, **_attributes(style, ATTRIBUTES)))
    return str(style)


def _cells(row: Iterable[Segment]) -> Cells:
    return [(char, _visible(style or Style(), char)) for text, style, control in row if not control for char in text]


def _visible(style: Style, char: str) -> Style:
    attributes = _attributes(style, LINES if char == " " else ATTRIBUTES)
    return Style(color=None if char == " " and not attributes else style.color, bgcolor=style.bgcolor, **attributes)


def _attributes(style: Style, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: True for name in names if getattr(style, name)}


def _runs(row: Cells) -> Iterator[tuple[Style, int, int]]:
    """Yield each style with its first column and the one after its last; blanks between words take the words' style."""
    groups = [(style, [*cells]) for style, cells in itertools.groupby(row, key=lambda cell: cell[1])]
    styles = [style for style, _ in groups]
    for at in range(1, len(groups) - 1):
        before, after = styles[at - 1], groups[at + 1][0]
        if before == after and styles[at] == Style(bgcolor=before.bgcolor) and groups[at][1][0][0] == " ":
            styles[at] = before
    sized = zip(styles, (len(cells) for _, cells in groups), strict=True)
    end = 0
    for style, parts in itertools.groupby(sized, key=lambda part: part[0]):
        first, end = end, end + sum(size for _, size in parts)
        yield style, first, end


def as_svg(text: str) -> str:
    """Draw the text of a picture."""
    head, *lines = text.splitlines()
    size, _, name = head.partition(" ")
    columns, rows = map(int, size.split("x"))
    default = Style.parse(name)
    background = Style(bgcolor=default.bgcolor)
    screen: list[Cells] = []
    for line in lines:
        if line.startswith("|"):
            row = line[1:] + " " * (columns - cell_len(line[1:]))
            screen.append([(char, default) for char in row])
            continue
        name, _, spans = line.strip().rpartition(": ")
        style = background + Style.parse(name)
        for span in spans.split():
            first, _, last = span.partition("-")
            for at in range(int(first), int(last or first) + 1):
                screen[-1][at] = (screen[-1][at][0], style)
    console = Console(
        width=columns,
        height=rows,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
        record=True,
        legacy_windows=False,
    )
    for cells in screen:
        runs = itertools.groupby(cells, key=lambda cell: cell[1])
        segments = [Segment("".join(char for char, _ in run), style) for style, run in runs]
        console.print(Segments([*segments, Segment.line()]), end="")
    return console.export_svg(title="trainctl", unique_id="terminal")
