"""The dialog that chooses what a chart shows: a list to tick, narrowed by typing."""

from collections.abc import Callable, Iterable
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from trainctl.tui.charts import picker as pk
from trainctl.tui.charts.viewport import ChartView, Pick
from trainctl.tui.dialogs.popup import Dialog
from trainctl.tui.text.styled_line import Line, groups, key_words
from trainctl.tui.widgets.fields import InputField

_MOST_ROWS = 24
_FRAME_ROWS = 6


class Narrow(InputField):
    """What narrows the list. A space ticks a line, but among words that are typed it is one."""

    def check_consume_key(self, key: str, character: str | None) -> bool:
        return (key != "space" or bool(self.value)) and super().check_consume_key(key, character)


class ChartPicker(Dialog[None]):
    """Ticks metrics of the chart in focus and runs for all charts; `toggle` does it at once and gives the new view."""

    DEFAULT_CSS = """
    ChartPicker { background: $background 40%; }
    ChartPicker #dialog { width: 68; }
    ChartPicker Lines { height: auto; }
    #narrow { width: 1fr; height: 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "close", show=False, priority=True),
        Binding("down", "move(1)", "down", show=False, priority=True),
        Binding("up", "move(-1)", "up", show=False, priority=True),
        Binding("pagedown", "move(10)", "down", show=False, priority=True),
        Binding("pageup", "move(-10)", "up", show=False, priority=True),
        Binding("enter,space", "toggle_here", "show or hide", show=False, priority=True),
    ]

    CELLS = 62

    def __init__(
        self, picker: pk.Picker, view: ChartView, title: str, toggle: Callable[[Pick | str], ChartView]
    ) -> None:
        super().__init__(title)
        self.picker, self._view, self._toggle = picker, view, toggle

    def content(self) -> Iterable[Widget]:
        yield Narrow(id="narrow", placeholder="type to filter by metric, node or run", compact=True)
        yield from super().content()

    def on_mount(self) -> None:
        self.query_one("#narrow").focus()

    def text(self) -> list[Line]:
        rows = max(min(len(self.picker.choices), _MOST_ROWS, self.size.height - _FRAME_ROWS), 1)
        hints = (("enter", "or click shows or hides it"), ("up down", "choose"), ("esc", "done"))
        keys = [key_words(key, words) for key, words in hints]
        listed = pk.lines(self.picker, self._view, self.cells, rows, self._glyphs)
        return [*listed, (), groups(keys, self.cells)]

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
        self.refresh_text()

    def action_move(self, by: int) -> None:
        self._narrow()
        self.picker = pk.moved(self.picker, by)
        self.refresh_text()

    def action_toggle_here(self) -> None:
        self._narrow()
        chosen = self.picker.chosen
        if chosen is not None:
            self._view = self._toggle(chosen.what)
            self.refresh_text()

    def action_turn(self, index: int) -> None:
        """A click on a line; what is typed goes on narrowing."""
        self.query_one("#narrow").focus()
        self.picker = pk.moved(self.picker, index - self.picker.cursor)
        self.action_toggle_here()
