"""The thin Textual side of the charts: lines that tell where the mouse is, turns its wheel or drags."""

from textual import events
from textual.message import Message

from trainctl.tui.widgets.line_view import Lines


class ChartArea(Lines):
    """Lines that post what the mouse does on them, in cells from their upper left corner."""

    class Pointed(Message):
        """The mouse moved, or was pressed."""

        def __init__(self, column: int, row: int, *, pressed: bool = False) -> None:
            super().__init__()
            self.column, self.row, self.pressed = column, row, pressed

        def can_replace(self, message: Message) -> bool:
            """Only the last of many moves counts."""
            return isinstance(message, ChartArea.Pointed) and not message.pressed and not self.pressed

    class Wheeled(Message):
        """The wheel turned: `by` is -1 upwards, 1 downwards."""

        def __init__(self, by: int, column: int, row: int) -> None:
            super().__init__()
            self.by, self.column, self.row = by, column, row

    class Dragged(Message):
        """The mouse moved by `columns` with its button down."""

        def __init__(self, columns: int) -> None:
            super().__init__()
            self.columns = columns

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button and event.delta_x:
            self.post_message(self.Dragged(event.delta_x))
        elif not event.button:
            self.post_message(self.Pointed(event.x, event.y))

    def on_mouse_down(self, event: events.MouseDown) -> None:
        if event.button == 1 and not event.style.meta.get("@click"):
            self.capture_mouse()
            self.post_message(self.Pointed(event.x, event.y, pressed=True))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        event.stop()
        self.post_message(self.Wheeled(-1, event.x, event.y))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        event.stop()
        self.post_message(self.Wheeled(1, event.x, event.y))
