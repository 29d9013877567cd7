"""Lists to choose from (changes to undo, each in its verb's own dialog, and values to copy), and an event in full."""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.messages import Event, event_prose
from trainctl.protocol.messages.events import SharesChanged
from trainctl.tui.commands import arguments, forms, undo
from trainctl.tui.commands.context import AppContext, Values
from trainctl.tui.dialogs.popup import CLOSES, Chooser, Popup
from trainctl.tui.dialogs.split_dialog import dialog_of
from trainctl.tui.state import effects, run_events
from trainctl.tui.state.view_state import Clock, ViewState
from trainctl.tui.text.formatting import moment
from trainctl.tui.text.styled_line import Line, clean, key_words, labelled, shorten


def offer_undo(app: AppContext) -> None:
    """Let a person choose among the newest changes that can be undone."""
    state = app.shown
    found = undo.newest(state.run, state.run_events)
    if not found:
        app.notify("nothing to undo: no change of this run can be undone now", severity="warning")
        return
    words = [_line_of(inverse, app.clock) for inverse in found]
    chooser = Chooser("undo which change?", words, "opens its dialog")
    app.push_screen(chooser, lambda index: open_undo(app, found[index]) if index is not None else None)


def open_undo(app: AppContext, inverse: undo.Inverse) -> None:
    """Open the dialog of the command that undoes an event, filled."""
    form = _form(inverse, app.shown)
    app.push_screen(dialog_of(form, app.shown, app.selected, inverse.order.args.get("shares")))


def _form(inverse: undo.Inverse, state: ViewState) -> forms.Form:
    order = inverse.order
    args = {name: f"{value:.7g}" if isinstance(value, float) else str(value) for name, value in order.args.items()}
    values = {**args, **({"node": order.node} if order.node else {})}
    made = forms.form(order.verb, state, None, values)
    if order.node is None:  # for all nodes at once: the dialog would ask for one
        made = replace(made, fields=tuple(field for field in made.fields if field.name != "node"))
    remarks = (clean(inverse.says), *(clean(text) for text in inverse.remarks))
    return replace(made, title=f"undo: {made.title}", undoes=order.undoes, remarks=remarks)


def _line_of(inverse: undo.Inverse, clock: Clock) -> str:
    event = inverse.event
    at = clock.time_of(event.at)
    changed = clean(run_events.event_words(event, "→"))
    return f"{at} {clean(event.by)} {changed}; sends {clean(_sent(inverse))}"


def _sent(inverse: undo.Inverse) -> str:
    had, shares = inverse.event.data, inverse.order.args.get("shares")
    if not isinstance(had, SharesChanged) or not isinstance(shares, dict):
        return arguments.spoken(inverse.order)
    other = [f"{node}={share}" for node, share in shares.items() if share != had.after.get(node)]
    return " ".join([inverse.order.verb, *other])


def copy_value(app: AppContext, values: Values) -> None:
    """Copy a value, or lets a person choose one of several."""
    if not values:
        app.notify("nothing to copy here", severity="warning")
    elif len(values) == 1:
        _copy(app, *values[0])
    else:
        words = [f"{name:<11} {clean(value)}" for name, value in values]
        chooser = Chooser("copy what?", words, "copies it")
        app.push_screen(chooser, lambda index: _copy(app, *values[index]) if index is not None else None)


def _copy(app: AppContext, name: str, value: str) -> None:
    """Copy by OSC 52, which reaches the clipboard of the terminal that a person sits at, over SSH too."""
    app.copy_to_clipboard(value)
    app.notify(f"copied {name}: {shorten(clean(value), 60)}", markup=False)


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
