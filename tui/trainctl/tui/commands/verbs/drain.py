"""`drain`: a node leaves the group, and its trainer waits."""

from trainctl.protocol import messages as m
from trainctl.tui.commands import shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription
from trainctl.tui.commands.verb_parts import moved, no_node, node_field
from trainctl.tui.state.plan_changes import node_of
from trainctl.tui.state.rank_speed import HELD_STATES, live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (node_field([view for view in (state.run.ranks if state.run else ()) if view.state != "drained"], rank),)


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    mine = [view for view in run.ranks if view.node == order.node]
    if not mine:
        return no_node(order, run)
    node = clean(mine[0].node)
    if {view.state for view in mine} <= {"drained", "draining"}:
        return f"{node} is already drained"
    others = [view for view in live_ranks(run) if view.node != order.node]
    return "" if others else f"{node} is the last node in the group"


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    """What its leaving makes of the others."""
    node, seats = order.node or "", shares.seats_of(state)
    if all(seat.node != node for seat in seats):
        return f"{clean(node)} stays out until it is admitted; curve unchanged"
    staying = [seat for seat in seats if seat.node != node]
    left = [share for share in shares.without(seats, node) if share]
    return f"{clean(node)} leaves; {moved(seats, staying, left, glyphs)}"


def _undo(event: m.Event, run: m.RunView) -> Order:
    node = node_of(event)
    views = [view for view in run.ranks if view.node == node]
    if event.kind != "command" or node is None or not views:
        raise NoInverse("no command caused it")
    if not any(view.state in HELD_STATES for view in views):
        raise NoInverse(f"{node} is {views[0].state}, not drained")
    return Order("admit", {}, node)


DESCRIPTION = VerbDescription(
    "drain",
    title="drain a node",
    changes="the node leaves the group; the others take its samples",
    keeps="the curve; the node's trainer waits for admit",
    fields=_fields,
    refused=_refused,
    preview=_preview,
    undo=_undo,
)
