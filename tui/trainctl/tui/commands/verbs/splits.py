"""Verbs that divide a batch, and never change the loss: shares, and micro-batches. Pure."""

from trainctl.protocol.messages import Event, RankView, RunView
from trainctl.protocol.messages.events import MicroBatchChanged, SharesChanged
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import (
    FormField,
    NoInverse,
    VerbDescription,
    VerbKey,
    node_field,
)
from trainctl.tui.state.view_state import ViewState


def _live(state: ViewState) -> tuple[RankView, ...]:
    return state.run.live_ranks if state.run is not None else ()


def _rebalance_undo(event: Event, run: RunView) -> Order:
    had = event.data.before if isinstance(event.data, SharesChanged) else {}
    before = {node: share for node, share in had.items() if share}
    now: dict[str, int] = {}
    for view in run.live_ranks:
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


REBALANCE = VerbDescription(
    "rebalance",
    title="split the global batch",
    changes="the samples each node takes (speed only)",
    keeps="loss, global batch, learning rate, micro-batches unless auto",
    blocked=lambda state: (
        "one rank takes the whole batch: nothing to split" if len(state.run.live_ranks if state.run else ()) < 2 else ""
    ),
    undo=_rebalance_undo,
    against_plan=True,
    dialog="split",
    key=VerbKey("s", "split", "samples per node", 20),
)


def _resize_batch_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    views = _live(state)
    node = node_field(views, rank)
    micro = next((view.micro_batch for view in views if view.rank == rank), views[0].micro_batch if views else None)
    return node, FormField("micro", "micro-batch", str(micro or ""))


def _resize_batch_views(order: Order, run: RunView) -> list[RankView]:
    return [view for view in run.live_ranks if order.node in (None, view.node)]


def _resize_batch_changes_nothing(order: Order, run: RunView) -> bool:
    views = _resize_batch_views(order, run)
    return bool(views) and all(view.micro_batch == order.args.get("micro") for view in views)


def _resize_batch_undo(event: Event, run: RunView) -> Order:
    if event.kind != "command":
        raise NoInverse("the node ran out of memory at that size; choose a different one with resize-batch")
    if not isinstance(event.data, MicroBatchChanged):
        raise NoInverse("the previous size isn't known")
    pairs = event.data.before
    before = dict(pairs)
    if any(size != before[node] for node, size in pairs):
        raise NoInverse("the node's ranks had different sizes, and one command can only set one size")
    live = [view.node for view in run.live_ranks]
    if len(before) == 1:
        node, size = next(iter(before.items()))
        known = node or (live[0] if len(set(live)) == 1 else None)
        if known is None:
            raise NoInverse("the record doesn't name its node")
        if known not in live:
            raise NoInverse(f"{known} isn't in the group now")
        return Order(RESIZE_BATCH.name, {"micro": size}, known)
    if len(set(before.values())) > 1 or set(before) != set(live):
        each = ", ".join(f"{name} {size}" for name, size in before.items())
        raise NoInverse(f"it takes several commands to restore the nodes' sizes: {each}")
    return Order(RESIZE_BATCH.name, {"micro": next(iter(before.values()))})


RESIZE_BATCH = VerbDescription(
    "resize-batch",
    title="resize micro-batch",
    changes="samples per forward/backward pass (speed and memory)",
    keeps="loss, global batch, learning rate",
    fields=_resize_batch_fields,
    changes_nothing=_resize_batch_changes_nothing,
    undo=_resize_batch_undo,
    against_plan=True,
    key=VerbKey("b", "batch", "a node's micro-batch", 10),
)

DESCRIPTIONS = (REBALANCE, RESIZE_BATCH)
