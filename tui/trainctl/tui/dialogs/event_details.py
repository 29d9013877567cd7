"""One event with all that is known of it: every field in full, the measured effect, and its undoing."""

from collections.abc import Callable
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.messages import Event, event_prose
from trainctl.tui.commands import arguments, undo
from trainctl.tui.dialogs.popup import CLOSES, Popup
from trainctl.tui.state import effects
from trainctl.tui.state.view_state import Clock
from trainctl.tui.text.formatting import moment
from trainctl.tui.text.styled_line import Line, key_words, labelled

_NAME_CELLS = 12


def lines(
    event: Event,
    effect: effects.Effect | None,
    undoing: undo.Inverse | str,
    clock: Clock,
    columns: int,
    undid: Event | None = None,
) -> list[Line]:
    """Return every field that is set, wrapped; `undoing` is the inverse command or why there is none."""
    at = moment(event.at, clock.zone)
    fields = [
        ("when", f"{at:%A %d %B %Y, %H:%M:%S}" if at is not None else ""),
        ("who", event.by),
        ("what", event.verb or event.kind),
        ("text", event.text.replace(event_prose.ARROW, "→")),
        ("step", f"{event.step:,}" if event.step is not None else ""),
        ("generation", str(event.generation) if event.generation is not None else ""),
        ("before", event.before or ""),
        ("after", (event.after or "") if event.kind != "alert" else ""),
        ("outcome", event.outcome or ""),
        ("severity", "" if event.severity == "info" else event.severity),
        ("undoes", f"{undid.verb} @{undid.step or 0:,}" if undid is not None else ""),
        ("effect", effects.figures(effect, event) if event.kind == "command" or effect is not None else ""),
        ("alert id", getattr(event.data, "id", "")),
        ("command id", event.command or ""),
    ]
    drawn: list[Line] = [()]
    for name, value in fields:
        drawn += labelled(name.ljust(_NAME_CELLS), value, columns) if value else []
    undoes = key_words("u", "undoes it  ", "screen.undo") if isinstance(undoing, undo.Inverse) else ()
    keys = (*undoes, *key_words("y", "copies  ", "screen.copy"), *CLOSES)
    return [*drawn, (), *_undo_lines(undoing, columns), (), keys]


def _undo_lines(undoing: undo.Inverse | str, columns: int) -> list[Line]:
    if isinstance(undoing, str):
        return labelled("undo".ljust(_NAME_CELLS), f"none: {undoing}", columns, "dim")
    lines = labelled("undo".ljust(_NAME_CELLS), arguments.spoken(undoing.order), columns, "strong")
    for remark in undoing.remarks:
        lines += labelled(" " * _NAME_CELLS, remark, columns, "warning")
    return lines


class EventDetails(Popup[str]):
    """Shows one event; `made` gives its lines for a width at each repaint. Gives "undo" or "copy" if that is next."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "close", "close", priority=True),
        Binding("u", "undo", "undo it", priority=True),
        Binding("y", "copy", "copy", priority=True),
    ]

    def __init__(self, made: Callable[[int], list[Line]]) -> None:
        super().__init__("event")
        self._made = made

    def text(self) -> list[Line]:
        return self._made(self.cells)

    def action_undo(self) -> None:
        self.dismiss("undo")

    def action_copy(self) -> None:
        self.dismiss("copy")
