"""Pictures of screens: as text, which tests compare and a diff shows, and as SVG, which docs/operating.md shows.

`python -m tools.pictures [--check]` draws the pictures of the docs from those of the tests, or says which are out of
date. The text begins with a picture's size and its most frequent style. Each row of the screen follows behind a `|`,
and below it stand the columns, counted from 0, of each other style in it. A style without a background has that of the
most frequent one.
"""

import argparse
import io
import itertools
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.cells import cell_len
from rich.color import Color
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "docs" / "pictures"
SNAPSHOTS: Final = ROOT / "tests" / "tui" / "screens" / "__snapshots__"
SOURCES: Final = {
    "group.svg": "test_pictures/test_overview_of_a_mixed_group[120x40].txt",
    "node.svg": "test_pictures/test_node[120x40].txt",
    "calibration.svg": "test_calibration/test_pictures[120x40].txt",
    "charts.svg": "test_charts/test_charts_with_log_crosshair_smoothing_and_tokens[120x40].txt",
    "events.svg": "test_pictures/test_tables[events-120x40].txt",
    "alert.svg": "test_alerts/test_picture_of_alerts_on_the_overview[why].txt",
    "diagnosis.svg": "test_diagnosis/test_the_screen[several-120x40].txt",
    "policies.svg": "test_policies/test_the_panel_on_a_policy_that_has_acted[120x40].txt",
    "profile.svg": "test_step_profile/test_the_screen[120x40].txt",
    "split.svg": "test_pictures/test_split_dialog[plan].txt",
}
"""Picture of the docs -> picture of the tests."""
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


def out_of_date() -> list[str]:
    """Return the pictures of the docs that are missing or differ from the tests' pictures."""
    files = {name: FOLDER / name for name in SOURCES}
    return [name for name, file in files.items() if not file.is_file() or file.read_text("utf-8") != drawn(name)]


def drawn(name: str) -> str:
    """Return the SVG of a picture of the docs."""
    return as_svg((SNAPSHOTS / SOURCES[name]).read_text("utf-8"))


def main() -> int:
    """Draw or check the pictures of the docs; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pictures")
    parser.add_argument("--check", action="store_true", help="draw nothing; fail if a picture is out of date")
    old = out_of_date()
    if parser.parse_args().check:
        for name in old:
            print(f"docs/pictures/{name} is out of date: run python -m tools.pictures", file=sys.stderr)
        return 1 if old else 0
    for name in old:
        (FOLDER / name).write_text(drawn(name), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
