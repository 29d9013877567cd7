"""`mute`: a kind of alert calls nobody for a while."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    alert = next(iter(state.calling), None)
    return (
        FormField("kind", "kind", alert.kind if alert else ""),
        FormField("node", "node (empty: all)", alert.node if alert else ""),
        FormField("minutes", "minutes", "60"),
    )


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    where, minutes = f" of {clean(order.node)}" if order.node else "", float(order.args.get("minutes", 60))
    calling = f"muted for {minutes:g} min (still recorded)" if minutes else "no longer muted"
    return f"{order.args['kind']} alerts{where} {calling}"


DESCRIPTION = VerbDescription(
    "mute",
    title="mute a kind of alert",
    changes="these alerts ring no bell, call no hook and aren't counted",
    keeps="they are still watched and recorded",
    acts_on="alerts",
    fields=_fields,
    preview=_preview,
    undo="mute with minutes=0 ends it",
)
