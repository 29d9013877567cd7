"""An app on a real terminal: what this folder does better than Textual, where the guard allows it."""

from typing import Any

from rich.console import RenderableType
from rich.segment import Segment
from textual.app import App
from textual.color import Color
from textual.driver import Driver
from textual.filter import LineFilter
from textual.screen import Screen

from trainctl.tui.terminal import guard, memory
from trainctl.tui.text.glyphs import in_same_cells


class AsciiFilter(LineFilter):
    """The last resort of a screen in ASCII: what Textual's own widgets draw (edges, scroll bars, messages, the palette)
    and what is typed, each character replaced in the cells that it has."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [
            segment if segment.control or segment.text.isascii() else segment._replace(text=in_same_cells(segment.text))
            for segment in segments
        ]


class TerminalApp(App[int]):
    """Textual's, but for the driver of its terminal and the bytes of its updates."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        memory.let_closed_screens_go()

    def get_driver_class(self) -> type[Driver]:
        """Textual's, but for a terminal of this system one of ours."""
        found = super().get_driver_class()
        if found.__name__ != "LinuxDriver" or not guard.allows("driver"):
            return found
        from trainctl.tui.terminal.driver import TerminalDriver

        return TerminalDriver

    if guard.allows("partial update"):

        def _display(self, screen: Screen[Any], renderable: RenderableType | None) -> None:
            from trainctl.tui.terminal.partial_update import compact

            super()._display(screen, compact(renderable))
