"""What a command would do to the run as it is now, in one line, or why the agent will refuse it: pure."""

import math
from collections.abc import Collection, Sequence

from trainctl.protocol import messages as m
from trainctl.protocol import verbs
from trainctl.tui import format as f
from trainctl.tui import pace, shares
from trainctl.tui.calls import Order
from trainctl.tui.glyphs import Glyphs
from trainctl.tui.lines import Piece, clean
from trainctl.tui.model import ViewState
from trainctl.tui.pace import live_ranks


def preview(order: Order, state: ViewState, glyphs: Glyphs) -> Piece:
    """What the command would do to the run as it is now, in one line; or, marked as bad, why the agent will refuse
    it."""
    problem = _refusal(order, state)
    return Piece(problem, "bad") if problem else Piece(_promise(order, state, glyphs), "strong")


def _refusal(order: Order, state: ViewState) -> str:
    """What the agent can already be seen to refuse it for, as far as that shows here."""
    run = state.run
    if run is None:
        return ""
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
        _new_shares(order, shares.seats_of(state))
    except ValueError as error:
        return clean(str(error))
    return ""


def _new_shares(order: Order, seats: tuple[shares.Seat, ...]) -> tuple[int, ...] | None:
    """What the split would be; None where only the agent can tell. Raises ValueError for one that can't be."""
    if order.args.get("auto"):
        return shares.fastest(seats)
    return shares.resolve(seats, order.args["shares"])


def _refuse_node(order: Order, run: m.RunView) -> str:
    mine = [view for view in run.ranks if view.node == order.node]
    if not mine:
        return _no_node(order, run)
    node, states = clean(mine[0].node), {view.state for view in mine}
    if order.verb == "admit":
        if any(view.state == "failed" and view.pid is None for view in mine):
            return f"the trainer of {node} is not there to take part"
        return "" if states & pace.HELD_STATES else _why_not_admitted(node, states)
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


def _promise(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    run = state.run
    if run is None:
        return verbs.VERBS[order.verb].summary
    match order.verb:
        case "resize-batch":
            return _preview_resize(order, run, glyphs)
        case "rebalance":
            return _preview_shares(order, state, glyphs)
        case "drain":
            seats = shares.seats_of(state)
            if all(seat.node != order.node for seat in seats):
                return f"{clean(order.node or '')} stays out until it is admitted; curve unchanged"
            staying = [seat for seat in seats if seat.node != order.node]
            left = [share for share in shares.without(seats, order.node or "") if share]
            return f"{clean(order.node or '')} leaves; {_moved(seats, staying, left, glyphs)}"
        case "admit":
            seats = shares.seats_of(state, order.node or "")
            before = [seat for seat in seats if seat.node != order.node]
            return _moved(before, seats, shares.with_back(seats, order.node or ""), glyphs)
        case "promote":
            taken = " even without a majority" if order.args.get("old_lead_is_off") else ""
            return f"{clean(order.node or '')} conducts in the place of {clean(run.lead)}{taken}; curve unchanged"
        case "set-lr":
            return _preview_rate(order, run, glyphs)
        case "set-global-batch":
            value = int(order.args["value"])
            scaled = (
                f"lr {glyphs.times}{value / run.global_batch:.3g}"
                if order.args.get("schedule") == "scale"
                else "lr as it is"
            )
            return f"G {run.global_batch} {glyphs.arrow} {value}, {scaled}: changes the curve"
        case "stop":
            last = "with a checkpoint first" if order.args.get("checkpoint", True) else "WITHOUT a checkpoint"
            return f"ends after step {run.step + 1:,}, {last}"
        case "acknowledge":
            alert = next((alert for alert in state.open_alerts if alert.id == order.args["id"]), None)
            return clean(f"{alert.node} {alert.text}".strip()) if alert else verbs.VERBS[order.verb].summary
        case "mute":
            where, minutes = f" of {clean(order.node)}" if order.node else "", float(order.args.get("minutes", 60))
            calling = f"call nobody for {minutes:g} min; they are still kept" if minutes else "call again"
            return f"{order.args['kind']} alerts{where} {calling}"
        case "checkpoint":
            return f"writes step {run.step:,} or the one after"
    return verbs.VERBS[order.verb].summary


def _preview_resize(order: Order, run: m.RunView, glyphs: Glyphs) -> str:
    micro = int(order.args["micro"])
    views = [view for view in live_ranks(run) if order.node in (None, view.node)]
    parts = []
    for view in views:
        old, new = (_passes(view.share, size, glyphs) for size in (view.micro_batch, micro))
        parts.append(
            f"{clean(view.node)} {old} {glyphs.arrow} {new}" if old != new else f"{clean(view.node)} stays {old}"
        )
    return f"{'; '.join(parts)}; curve unchanged"


def _preview_shares(order: Order, state: ViewState, glyphs: Glyphs) -> str:
    seats = shares.seats_of(state)
    wanted = _new_shares(order, seats)
    if wanted is None:
        return "own rates are not measured yet; the agent decides"
    return _moved(seats, seats, wanted, glyphs)


def _moved(before: Sequence[shares.Seat], after: Sequence[shares.Seat], wanted: Sequence[int], glyphs: Glyphs) -> str:
    """What each node of `after` has and gets, and the step that makes of the one that those of `before` take now."""
    moved = [
        f"{clean(seat.node)} {seat.share} {glyphs.arrow} {share}"
        for seat, share in zip(after, wanted, strict=True)
        if seat.share != share
    ]
    now = shares.group_seconds(before, [seat.share for seat in before])
    then = shares.group_seconds(after, wanted)
    step = f"; step {f.seconds(now)} {glyphs.arrow} {f.seconds(then)}" if now is not None and then is not None else ""
    return f"{', '.join(moved) or 'the split it has'}{step if moved else ''}; curve unchanged"


def _passes(share: int, micro: int, glyphs: Glyphs) -> str:
    micro = max(min(micro, share), 1)
    return f"{micro}{glyphs.times}{math.ceil(share / micro)}"


def _preview_rate(order: Order, run: m.RunView, glyphs: Glyphs) -> str:
    value = float(order.args["value"])
    change = f"lr {f.scientific(run.learning_rate)} {glyphs.arrow} {f.scientific(value)}"
    if order.args.get("schedule", "scale") == "set":
        return f"{change}, constant from then on: changes the curve"
    times = f", the rest of the schedule {glyphs.times}{value / run.learning_rate:.3g}" if run.learning_rate else ""
    return f"{change}{times}: changes the curve"
