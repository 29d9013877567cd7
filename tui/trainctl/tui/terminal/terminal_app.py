"""An app on a real terminal: what this folder does better than Textual, where the guard allows it."""

from typing import Any

from rich.console import RenderableType
from textual.app import App
from textual.driver import Driver
from textual.screen import Screen

from trainctl.tui.terminal import guard, memory


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
