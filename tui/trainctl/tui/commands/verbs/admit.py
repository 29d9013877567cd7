"""`admit`: a node that is out comes back into the group."""

from collections.abc import Collection, Sequence

from trainctl.protocol import messages as m
from trainctl.tui.commands import shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription
from trainctl.tui.commands.verb_parts import moved, no_node, node_field
from trainctl.tui.state.plan_changes import node_of
from trainctl.tui.state.rank_speed import HELD_STATES
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (node_field([view for view in (state.run.ranks if state.run else ()) if view.state in HELD_STATES], rank),)


def _blocked(state: ViewState, fields: Sequence[FormField]) -> str:
    return "" if fields[0].choices else "no node is drained or failed"


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    mine = [view for view in run.ranks if view.node == order.node]
    if not mine:
        return no_node(order, run)
    node, states = clean(mine[0].node), {view.state for view in mine}
    if any(view.state == "failed" and view.pid is None for view in mine):
        return f"{node} has no running trainer"
    return "" if states & HELD_STATES else _why_not(node, states)


def _why_not(node: str, states: Collection[str]) -> str:
    if "rejoining" in states:
        return f"{node} is coming back and rejoins automatically"
    if "lost" in states:
        return f"{node} is lost; unless it was drained, it rejoins automatically when it is back"
    return f"{node} is not drained"


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    """What its return makes of the others."""
    node = order.node or ""
    seats = shares.seats_of(state, node)
    before = [seat for seat in seats if seat.node != node]
    return moved(before, seats, shares.with_back(seats, node), glyphs)


def _undo(event: m.Event, run: m.RunView) -> Order:
    node = node_of(event)
    views = [view for view in run.ranks if view.node == node]
    if event.kind != "command" or node is None or not views:
        raise NoInverse("no command caused it")
    if all(view.state in HELD_STATES for view in views):
        raise NoInverse(f"{node} is already out again")
    return Order("drain", {}, node)


def _undo_remark(order: Order) -> str:
    return "its new share follows from its last rate and may differ from the old one"


DESCRIPTION = VerbDescription(
    "admit",
    title="admit a node",
    changes="the node rejoins the group and is brought up to date",
    keeps="the curve, the global batch",
    fields=_fields,
    blocked=_blocked,
    refused=_refused,
    preview=_preview,
    undo=_undo,
    undo_remark=_undo_remark,
)
