"""`rebalance`: who takes how many samples of the global batch."""

from collections.abc import Sequence

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import SharesChanged
from trainctl.tui.commands import shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription, VerbKey
from trainctl.tui.commands.verb_parts import joined, micros_changed, moved, outcome
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _blocked(state: ViewState, fields: Sequence[FormField]) -> str:
    alone = len(live_ranks(state.run)) < 2
    return "one rank takes the whole batch: nothing to split" if alone else ""


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    try:
        shares.meant(shares.seats_of(state), order.args)
    except ValueError as error:
        return clean(str(error))
    return ""


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    seats = shares.seats_of(state)
    if not order.args.get("auto"):
        return moved(seats, seats, shares.resolve(seats, order.args["shares"]), glyphs)
    found = shares.fastest(seats)
    if found is None:
        return "own rates aren't measured yet; the agent decides"
    after = shares.with_micros(seats, found.micros)
    micros = micros_changed(seats, after, found.shares, glyphs)
    if micros and found.shares == tuple(seat.share for seat in seats):
        return joined(micros, *outcome(seats, after, found.shares, glyphs), "curve unchanged")
    return joined(micros, moved(seats, after, found.shares, glyphs))


def _undo(event: m.Event, run: m.RunView) -> Order:
    had = event.data.before if isinstance(event.data, SharesChanged) else {}
    before = {node: share for node, share in had.items() if share}
    now: dict[str, int] = {}
    for view in live_ranks(run):
        now[view.node] = now.get(view.node, 0) + (view.share or 0)
    gone, come = before.keys() - now.keys(), now.keys() - before.keys()
    if not before:
        raise NoInverse("the previous shares aren't known")
    if gone or come:
        who = ", ".join(sorted(gone or come))
        raise NoInverse(f"{who} {'is not in the group now' if gone else 'had no share then'}: rebalance again instead")
    if sum(before.values()) != run.global_batch:
        was = f"{sum(before.values())} {run.sample_unit}"
        raise NoInverse(f"they were shares of {was}, but the batch now has {run.global_batch}")
    if before == now:
        raise NoInverse("the shares are already restored")
    return Order("rebalance", {"shares": before})


DESCRIPTION = VerbDescription(
    "rebalance",
    title="split the global batch",
    changes="the samples each node takes (speed only)",
    keeps="loss, global batch, learning rate, micro-batches unless auto",
    blocked=_blocked,
    refused=_refused,
    preview=_preview,
    undo=_undo,
    against_plan=True,
    dialog="split",
    key=VerbKey("s", "split", "samples per node", 20),
)
