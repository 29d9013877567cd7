"""What stands next to each other under one rule: drawn blocks, and panels. Pure."""

from collections.abc import Sequence

from trainctl.tui.charts import panel as p
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.glyphs import Glyphs

Block = tuple[list[ln.Line], list[tuple[int, str, str]], int]
"""Rows, the labels that its part of the rule carries, and its cells."""


def side_by_side(panels: Sequence[p.Panel], columns: int, room: int, glyphs: Glyphs) -> list[ln.Line]:
    """The panels in exactly `room` lines of `columns` cells, each as wide as the others."""
    if room < 2 or not panels:
        return [ln.fit((), columns)] * max(room, 0)
    sizes = widths(columns, len(panels))
    blocks = [(*p.draw(item, size, room - 1, glyphs), size) for item, size in zip(panels, sizes, strict=True)]
    return beside(blocks, columns, room - 1, glyphs)


def beside(blocks: Sequence[Block], columns: int, rows: int, glyphs: Glyphs) -> list[ln.Line]:
    """Blocks of `rows` lines side by side under one rule."""
    labels: list[tuple[int, str, str]] = []
    start = 0
    for index, (_, own, size) in enumerate(blocks):
        labels += [(start - 1, glyphs.tee, "rule")] if index else []
        labels += [(start + at, text, role) for at, text, role in own]
        start += size + 1
    made = [ln.rule(columns, glyphs.horizontal, *labels)]
    for place in range(rows):
        pieces: list[ln.Piece] = []
        for index, (body, _, size) in enumerate(blocks):
            pieces += [ln.Piece(glyphs.vertical, "rule")] if index else []
            pieces += ln.fit(body[place], size)
        made.append(ln.fit(pieces, columns))
    return made


def widths(columns: int, count: int) -> list[int]:
    """Cells of each of `count` blocks, a line between them."""
    room = columns - (count - 1)
    sizes = [room // count] * count
    sizes[0] += room - sum(sizes)
    return sizes
