"""The dialog that chooses what a chart shows: a list to tick, narrowed by typing."""

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from trainctl.tui.charts import picker as pk
from trainctl.tui.charts.viewport import ChartView, Pick
from trainctl.tui.commands.context import context_of
from trainctl.tui.terminal.frame_batching import OneFrame
from trainctl.tui.text.styled_line import Piece, groups, line
from trainctl.tui.widgets.line_view import Field, Lines

_MOST_ROWS = 24
_FRAME_ROWS = 6
_CELLS = 62


class Narrow(Field):
    """What narrows the list. A space ticks a line, but among words that are typed it is one."""

    def check_consume_key(self, key: str, character: str | None) -> bool:
        return (key != "space" or bool(self.value)) and super().check_consume_key(key, character)


class ChartPicker(OneFrame, ModalScreen[None]):
    """Ticks metrics of the chart in focus and runs for all charts; each takes effect at once, by `toggle`, which gives
    the view that it made."""

    DEFAULT_CSS = """
    ChartPicker { align: center middle; background: $background 40%; }
    #picker { width: 68; max-width: 100%; height: auto; max-height: 100%; padding: 0 2;
      border: round $accent; border-title-color: $accent; border-title-style: bold; background: $surface; }
    #picker Lines { height: auto; }
    .ascii #picker { border: ascii $accent; }
    #narrow { width: 1fr; height: 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "close", show=False, priority=True),
        Binding("down", "move(1)", "down", show=False, priority=True),
        Binding("up", "move(-1)", "up", show=False, priority=True),
        Binding("pagedown", "move(10)", "down", show=False, priority=True),
        Binding("pageup", "move(-10)", "up", show=False, priority=True),
        Binding("enter", "toggle_here", "draw or not", show=False, priority=True),
        Binding("space", "toggle_here", "draw or not", show=False, priority=True),
    ]

    def __init__(
        self, picker: pk.Picker, view: ChartView, title: str, toggle: Callable[[Pick | str], ChartView]
    ) -> None:
        super().__init__()
        self.picker, self._view, self._title, self._toggle = picker, view, title, toggle

    def compose(self) -> ComposeResult:
        owner = context_of(self)
        box = Vertical(id="picker")
        box.border_title = self._title
        with box:
            yield Narrow(id="narrow", placeholder="type to narrow: a metric, a node, run", compact=True)
            yield Lines(owner.glyphs, id="choices", grow=True)
            yield Lines(owner.glyphs, id="picker-keys", grow=True)

    def on_mount(self) -> None:
        self.set_class(context_of(self).glyphs.ascii_only, "ascii")
        self.query_one("#narrow").focus()
        self._show()

    def on_resize(self) -> None:
        self._show()

    def _show(self) -> None:
        glyphs = context_of(self).glyphs
        columns = min(_CELLS, self.size.width - 6)
        rows = max(min(len(self.picker.choices), _MOST_ROWS, self.size.height - _FRAME_ROWS), 1)
        self.query_one("#choices", Lines).show(pk.lines(self.picker, self._view, columns, rows, glyphs))
        keys = [line(Piece(key, "key"), Piece(f" {words}", "label")) for key, words in (
            ("enter", "or click draws it, or not"), ("up down", "choose"), ("esc", "done"))]  # fmt: skip
        self.query_one("#picker-keys", Lines).show([(), groups(keys, columns)])

    @property
    def _typed(self) -> str:
        return self.query_one("#narrow", Input).value

    def _narrow(self) -> None:
        """Keys of one burst come before the field's message of the letters among them."""
        if self._typed != self.picker.wanted:
            self.picker = pk.typed(self.picker, self._typed)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._narrow()
        self._show()

    def action_move(self, by: int) -> None:
        self._narrow()
        self.picker = pk.moved(self.picker, by)
        self._show()

    def action_toggle_here(self) -> None:
        self._narrow()
        chosen = self.picker.chosen
        if chosen is not None:
            self._view = self._toggle(chosen.what)
            self._show()

    def action_turn(self, index: int) -> None:
        """A click on a line; what is typed goes on narrowing."""
        self.query_one("#narrow").focus()
        self.picker = pk.moved(self.picker, index - self.picker.cursor)
        self.action_toggle_here()

    def action_close(self) -> None:
        self.dismiss()
