"""What the agent can already be seen to refuse a command for: pure."""

from collections.abc import Collection

from trainctl.protocol import messages as m
from trainctl.tui.commands import shares
from trainctl.tui.commands.command import Order
from trainctl.tui.state import rank_speed
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.styled_line import clean


def refusal(order: Order, state: ViewState) -> str:
    """What the agent can already be seen to refuse it for, as far as that shows here."""
    run = state.run
    if order.verb == "start-run":
        return f"{clean(run.name)} is {run.state}; there is one run at a time" if state.active and run else ""
    if order.verb in ("acknowledge", "mute"):
        return ""
    if run is None:
        return "there is no run to command"
    if not state.active:
        return "" if order.verb == "note" else f"the run has {'failed' if run.state == 'failed' else 'ended'}"
    match order.verb:
        case "resize-batch":
            return _refuse_resize(order, run)
        case "rebalance":
            return _refuse_shares(order, state)
        case "set-global-batch":
            value, ranks = int(order.args["value"]), len(live_ranks(run))
            return f"{value} samples are too few for {ranks} ranks; each takes one or more" if value < ranks else ""
        case "drain" | "admit":
            return _refuse_node(order, run)
        case "promote":
            if all(view.node != order.node for view in run.ranks):
                return _no_node(order, run)
            return f"{clean(run.lead)} conducts the run already" if order.node == run.lead else ""
    return ""


def _refuse_resize(order: Order, run: m.RunView) -> str:
    views = [view for view in live_ranks(run) if order.node in (None, view.node)]
    out = next((view for view in run.ranks if order.node in (None, view.node)), None)
    if out is None:
        return _no_node(order, run)
    if not views:
        return f"{clean(out.node)} ({out.state}) runs no batch"
    micro = int(order.args["micro"])
    over = next((view for view in views if micro > view.share), None)
    return f"{micro} is over {clean(over.node)}'s share of {over.share} samples" if over else ""


def _no_node(order: Order, run: m.RunView) -> str:
    known = ", ".join(dict.fromkeys(clean(view.node) for view in run.ranks))
    return f"no node {order.node!r} in this run; there are {known}"


def _refuse_shares(order: Order, state: ViewState) -> str:
    try:
        shares.meant(shares.seats_of(state), order.args)
    except ValueError as error:
        return clean(str(error))
    return ""


def _refuse_node(order: Order, run: m.RunView) -> str:
    mine = [view for view in run.ranks if view.node == order.node]
    if not mine:
        return _no_node(order, run)
    node, states = clean(mine[0].node), {view.state for view in mine}
    if order.verb == "admit":
        if any(view.state == "failed" and view.pid is None for view in mine):
            return f"the trainer of {node} is not there to take part"
        return "" if states & rank_speed.HELD_STATES else _why_not_admitted(node, states)
    if states <= {"drained", "draining"}:
        return f"{node} is drained already"
    others = [view for view in live_ranks(run) if view.node != order.node]
    return "" if others else f"{node} is the last node in the group"


def _why_not_admitted(node: str, states: Collection[str]) -> str:
    if "rejoining" in states:
        return f"{node} is on its way back, and joins by itself"
    if "lost" in states:
        return f"{node} is lost; unless it was drained, it joins by itself once it is back"
    return f"{node} is not drained"
