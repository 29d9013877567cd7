"""The dialog that a verb's form is shown in: the split editor for shares, else one made from the form's fields."""

from collections.abc import Mapping
from dataclasses import replace

from trainctl.tui.commands import share_editor, verb_registry
from trainctl.tui.commands.forms import Form
from trainctl.tui.commands.share_editor import Split
from trainctl.tui.dialogs.command_dialog import CommandDialog, OrderDialog
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.state.view_state import ViewState


def dialog_of(form: Form, state: ViewState, rank: int | None, shares: Mapping[str, int] | None = None) -> OrderDialog:
    """`rank`: the selected one; `shares`: those to propose, by node."""
    if verb_registry.of(form.verb).dialog == "form":
        return CommandDialog(form)
    return SplitDialog(form, _proposing(share_editor.opened(state, rank), shares or {}))


def _proposing(opened: Split, wanted: Mapping[str, int]) -> Split:
    shares = tuple(wanted.get(seat.node, seat.share) for seat in opened.seats)
    return replace(opened, shares=shares) if wanted and sum(shares) == opened.total else opened
