"""`promote`: another node conducts the run."""

from collections.abc import Sequence

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import LeadChanged
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription
from trainctl.tui.commands.verb_parts import no_node, node_field
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    others = [view for view in state.run.ranks if view.node != state.run.lead] if state.run else []
    return (
        node_field(others, rank),
        FormField("old_lead_is_off", "old lead is off", "false", ("false", "true")),
    )


def _blocked(state: ViewState, fields: Sequence[FormField]) -> str:
    return "" if fields[0].choices else "no other node has a rank of the run"


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    if all(view.node != order.node for view in run.ranks):
        return no_node(order, run)
    return f"{clean(run.lead)} is already the lead" if order.node == run.lead else ""


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    taken = " even without a majority" if order.args.get("old_lead_is_off") else ""
    return f"{clean(order.node or '')} leads instead of {clean(run.lead)}{taken}; curve unchanged"


def _undo(event: m.Event, run: m.RunView) -> Order:
    before = event.data.before if isinstance(event.data, LeadChanged) else ""
    if before == run.lead:
        raise NoInverse(f"{before} is already the lead again")
    if all(view.node != before for view in run.ranks):
        raise NoInverse(f"{before or 'the old lead'} has no rank of the run")
    return Order("promote", {}, before)


DESCRIPTION = VerbDescription(
    "promote",
    title="make a node the lead",
    changes="who leads: the lead hands over, or a majority votes if it is gone",
    keeps="the curve, ranks and shares (costs one fence)",
    fields=_fields,
    blocked=_blocked,
    refused=_refused,
    preview=_preview,
    undo=_undo,
    ask="do it?",
)
