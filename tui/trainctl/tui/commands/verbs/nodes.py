"""Verbs about a node's part in a run: drain it, admit it, make it the lead. Pure."""

from trainctl.protocol.messages import Event, RankView, RunView
from trainctl.protocol.messages.events import LeadChanged
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import (
    FormField,
    NoInverse,
    Proposal,
    VerbDescription,
    node_field,
)
from trainctl.tui.state.run_events import node_of
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.styled_line import clean


def _ranks(state: ViewState) -> tuple[RankView, ...]:
    return state.run.ranks if state.run is not None else ()


def _node_of_command(event: Event, run: RunView) -> tuple[str, list[RankView]]:
    """Return the node that a command was for, and its ranks. Raises NoInverse if no command caused the event."""
    node = node_of(event)
    views = [view for view in run.ranks if view.node == node]
    if event.kind != "command" or node is None or not views:
        raise NoInverse("no command caused it")
    return node, views


def _drain_undo(event: Event, run: RunView) -> Order:
    node, views = _node_of_command(event, run)
    if not any(view.is_held for view in views):
        raise NoInverse(f"{node} is {views[0].state}, not drained")
    return Order("admit", {}, node)


DRAIN = VerbDescription(
    "drain",
    title="drain a node",
    changes="the node leaves the group; the others take its samples",
    keeps="the curve; the node's trainer waits for admit",
    fields=lambda state, rank: (node_field([view for view in _ranks(state) if view.state != "drained"], rank),),
    undo=_drain_undo,
)


def _admit_undo(event: Event, run: RunView) -> Order:
    node, views = _node_of_command(event, run)
    if all(view.is_held for view in views):
        raise NoInverse(f"{node} is already out again")
    return Order("drain", {}, node)


ADMIT = VerbDescription(
    "admit",
    title="admit a node",
    changes="the node rejoins the group and is brought up to date",
    keeps="the curve, the global batch",
    fields=lambda state, rank: (node_field([view for view in _ranks(state) if view.is_held], rank),),
    no_nodes="no node is drained or failed",
    undo=_admit_undo,
    undo_remark=lambda order: "its new share follows from its last rate and may differ from the old one",
)


def _promote_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    others = [view for view in state.run.ranks if view.node != state.run.lead] if state.run else []
    return node_field(others, rank), FormField("old_lead_is_off", "old lead is off", "false", ("false", "true"))


def _promote_preview(proposal: Proposal) -> str:
    order = proposal.order
    taken = " even without a majority" if order.args.get("old_lead_is_off") else ""
    return f"{clean(order.node or '')} leads instead of {clean(proposal.run.lead)}{taken}; curve unchanged"


def _promote_undo(event: Event, run: RunView) -> Order:
    before = event.data.before if isinstance(event.data, LeadChanged) else ""
    if before == run.lead:
        raise NoInverse(f"{before} is already the lead again")
    if all(view.node != before for view in run.ranks):
        raise NoInverse(f"{before or 'the old lead'} has no rank of the run")
    return Order("promote", {}, before)


PROMOTE = VerbDescription(
    "promote",
    title="make a node the lead",
    changes="who leads: the lead hands over, or a majority votes if it is gone",
    keeps="the curve, ranks and shares (costs one fence)",
    fields=_promote_fields,
    no_nodes="no other node has a rank of the run",
    preview=_promote_preview,
    undo=_promote_undo,
    ask="do it?",
)

DESCRIPTIONS = (DRAIN, ADMIT, PROMOTE)
