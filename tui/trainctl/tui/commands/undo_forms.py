"""The dialogs in which a change is undone: its verb's own, filled with the inverse, saying what it undoes."""

from dataclasses import replace

from trainctl.tui.commands import command_line, forms, undo
from trainctl.tui.commands.share_editor import Split
from trainctl.tui.state import event_text
from trainctl.tui.state.clock import Clock
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def form(inverse: undo.Inverse, state: ViewState) -> forms.Form:
    """The dialog's form; its command's id says which event it undoes."""
    order = inverse.order
    args = {name: f"{value:.7g}" if isinstance(value, float) else str(value) for name, value in order.args.items()}
    values = {**args, **({"node": order.node} if order.node else {})}
    made = forms.form(order.verb, state, None, values)
    if order.node is None:  # for all nodes at once: the dialog would ask for one
        made = replace(made, fields=tuple(field for field in made.fields if field.name != "node"))
    remarks = (clean(inverse.says), *(clean(text) for text in inverse.remarks))
    return replace(made, title=f"undo: {made.title}", id=order.id, remarks=remarks)


def split_of(inverse: undo.Inverse, opened: Split) -> Split:
    """The split dialog's shares, those from before the event proposed."""
    wanted = dict(inverse.order.args["shares"])
    shares = tuple(wanted.get(seat.node, seat.share) for seat in opened.seats)
    return replace(opened, shares=shares) if sum(shares) == opened.total else opened


def line_of(inverse: undo.Inverse, clock: Clock, glyphs: Glyphs) -> str:
    """One line of the list of changes: when, by whom, what and at which step, and what would be sent."""
    event = inverse.event
    at = f.clock(event.at, clock.wall(), clock.zone)
    changed = clean(event_text.words(event, glyphs.arrow))
    return f"{at} {clean(event.by)} {changed}; sends {clean(_sent(inverse))}"


def _sent(inverse: undo.Inverse) -> str:
    """The command, of shares those that the event had changed."""
    had = event_text.shares_in(inverse.event.after or "")
    shares = inverse.order.args.get("shares")
    if had is None or not isinstance(shares, dict):
        return command_line.spoken(inverse.order)
    other = [f"{node}={share}" for node, share in shares.items() if share != had.get(node)]
    return " ".join([inverse.order.verb, *other])
