"""The fields of dialogs and bars: one that is typed into, and one with a few choices."""

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from trainctl.tui.text.styled_line import cell_len
from trainctl.tui.widgets.theme import style_of


class InputField(Input):
    """An Input that takes keys strictly in the order they came.

    A plain Input inserts a character at once and a binding's key (backspace, enter) only after the whole batch, so
    that what a slow line delivers in one packet arrives shuffled.
    """

    def on_paste(self, event: events.Paste) -> None:
        """Insert all lines as one, where a plain Input takes only the first."""
        event.stop()
        event.prevent_default()
        lines = event.text.strip("\r\n").splitlines()
        self.replace(" ".join(lines[:1] + [line.strip() for line in lines[1:]]), *self.selection)

    async def on_key(self, event: events.Key) -> None:
        found = None if event.is_printable else self.screen.active_bindings.get(event.key)
        if found is not None and found.node is self:
            event.stop()
            event.prevent_default()
            await self.run_action(found.binding.action)


CHOICE_ROWS = 4
"""Rows of a choice at most; the rest comes into view as it is turned."""
_CHOICE_WORDS = {"true": "yes", "false": "no"}
_COUNT_CELLS = 10
"""Kept free at the end of a row for how many there are, where not all are in view."""


def choice_rows(choices: Sequence[str], columns: int) -> list[range]:
    """Return the choices by the rows that they take in so many cells."""
    sizes = [cell_len(_CHOICE_WORDS.get(text, text)) + 6 for text in choices]
    for room in (columns + 2, columns + 2 - _COUNT_CELLS):  # a row's last two cells are blanks
        rows, start, used = [], 0, 0
        for index, size in enumerate(sizes):
            if used and used + size > room:
                rows.append(range(start, index))
                start, used = index, 0
            used += size
        rows.append(range(start, len(choices)))
        if len(rows) <= CHOICE_ROWS:
            break
    return rows


class Choice(Widget, can_focus=True):
    """One of several values, turned with left, right, space or a click, by rows with up and down."""

    DEFAULT_CSS = "Choice { height: auto; width: 1fr; padding: 0 1; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right,space", "turn(1)", "next choice"),
        Binding("left", "turn(-1)", "previous choice"),
        Binding("down", "turn_row(1)", "next row", show=False),
        Binding("up", "turn_row(-1)", "previous row", show=False),
    ]
    index = reactive(0)

    class Changed(Message):
        """The news that another value was chosen."""

    def __init__(self, choices: tuple[str, ...], value: str, *, id: str) -> None:
        super().__init__(id=id)
        self.choices = choices
        self.set_reactive(Choice.index, choices.index(value) if value in choices else 0)

    @property
    def value(self) -> str:
        return self.choices[self.index]

    def action_turn(self, by: int) -> None:
        self.index = (self.index + by) % len(self.choices)

    def action_turn_row(self, by: int) -> None:
        size = len(choice_rows(self.choices, self.size.width)[0])
        self.index = min(max(self.index + by * size, 0), len(self.choices) - 1)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return min(len(choice_rows(self.choices, width)), CHOICE_ROWS)

    def on_click(self) -> None:
        self.action_turn(1)

    def watch_index(self) -> None:
        self.post_message(self.Changed())

    def render_line(self, y: int) -> Strip:
        theme = self.app.theme
        ground = Style(bgcolor=self.rich_style.bgcolor)
        rows = choice_rows(self.choices, self.size.width)
        mine = next(row for row, members in enumerate(rows) if self.index in members)
        first = min(max(mine - 1, 0), max(len(rows) - CHOICE_ROWS, 0))
        segments = []
        for index in rows[first + y] if first + y < len(rows) else ():
            text = _CHOICE_WORDS.get(self.choices[index], self.choices[index])
            chosen = index == self.index
            role = "dim" if not chosen else "cursor" if self.has_focus else "strong"
            mark = "(•) " if chosen else "( ) "
            segments.append(Segment(f"{mark}{text}  ", ground + style_of(role, theme)))
        if y == CHOICE_ROWS - 1 and len(rows) > CHOICE_ROWS:
            segments.append(Segment(f"{self.index + 1} of {len(self.choices)}", ground + style_of("label", theme)))
        return Strip(segments).adjust_cell_length(self.size.width, ground)
