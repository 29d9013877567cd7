"""The last resort of a screen in ASCII: what Textual's own widgets draw (edges, scroll bars, messages, the palette) and
what is typed, each character replaced in the cells that it has."""

from rich.segment import Segment
from textual.color import Color
from textual.filter import LineFilter

from trainctl.tui.text.glyphs import in_same_cells


class AsciiFilter(LineFilter):
    """Every segment in ASCII, as wide as it was."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.control or segment.text.isascii() else segment._replace(text=in_same_cells(segment.text))
            for segment in segments
        ]
