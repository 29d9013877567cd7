"""What a person may choose among: changes to undo, and values to copy."""

from trainctl.tui.commands import share_editor, undo, undo_forms
from trainctl.tui.commands.context import AppContext
from trainctl.tui.dialogs import clipboard
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.popup import Chooser
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.text.styled_line import clean, shorten


def offer_undo(app: AppContext) -> None:
    """Lets a person choose among the newest changes that can be undone."""
    state = app.shown
    found = undo.newest(state.run, state.run_events)
    if not found:
        app.notify("nothing to undo: no change of this run has an inverse now", severity="warning")
        return
    words = [undo_forms.line_of(inverse, app.clock, app.glyphs) for inverse in found]
    chooser = Chooser("undo which change?", words, "opens its dialog")
    app.push_screen(chooser, lambda index: open_undo(app, found[index]) if index is not None else None)


def open_undo(app: AppContext, inverse: undo.Inverse) -> None:
    """The dialog of the command that undoes an event, filled."""
    form = undo_forms.form(inverse, app.shown)
    if form.verb == "rebalance":
        made = undo_forms.split_of(inverse, share_editor.opened(app.shown, app.selected))
        app.push_screen(SplitDialog(form, made))
    else:
        app.push_screen(CommandDialog(form))


def copy_value(app: AppContext, values: clipboard.Values) -> None:
    """Copies a value, or lets a person choose one of several."""
    if not values:
        app.notify("nothing to copy here", severity="warning")
    elif len(values) == 1:
        _copy(app, *values[0])
    else:
        words = [f"{name:<11} {clean(value)}" for name, value in values]
        chooser = Chooser("copy what?", words, "copies it")
        app.push_screen(chooser, lambda index: _copy(app, *values[index]) if index is not None else None)


def _copy(app: AppContext, name: str, value: str) -> None:
    """By OSC 52, so that it reaches the clipboard of the terminal that a person sits at, over SSH too."""
    app.copy_to_clipboard(value)
    app.notify(f"copied {name}: {shorten(clean(value), 60, app.glyphs.ellipsis)}", markup=False)
