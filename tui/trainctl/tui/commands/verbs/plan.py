"""Verbs that change the plan: shares, micro-batches, learning rate, global batch, and which nodes take part. Pure."""

from trainctl.protocol.config.objectives import SAMPLES
from trainctl.protocol.messages import Event, RankView, RunView
from trainctl.protocol.messages.events import (
    GlobalBatchChanged,
    LeadChanged,
    LearningRateChanged,
    MicroBatchChanged,
    SharesChanged,
)
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import (
    FormField,
    NoInverse,
    Proposal,
    VerbDescription,
    VerbKey,
    node_field,
)
from trainctl.tui.state.run_events import node_of
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import scientific
from trainctl.tui.text.styled_line import clean


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
        return Order("resize-batch", {"micro": size}, known)
    if len(set(before.values())) > 1 or set(before) != set(live):
        each = ", ".join(f"{name} {size}" for name, size in before.items())
        raise NoInverse(f"it takes several commands to restore the nodes' sizes: {each}")
    return Order("resize-batch", {"micro": next(iter(before.values()))})


def _set_lr_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    rate = state.run.learning_rate if state.run else None
    value = FormField("value", "learning rate", scientific(rate) if rate is not None else "")
    return value, FormField("schedule", "schedule", "scale", ("scale", "set"))


def _set_lr_changes_nothing(order: Order, run: RunView) -> bool:
    if run.learning_rate is None:
        return False
    as_shown = float(scientific(run.learning_rate))
    is_same = order.args.get("value") in (run.learning_rate, as_shown)
    return is_same and order.args.get("schedule", "scale") == "scale"


def _set_lr_undo(event: Event, run: RunView) -> Order:
    rate = event.data
    if not isinstance(rate, LearningRateChanged):
        raise NoInverse("the previous learning rate isn't known")
    if rate.was_constant:
        return Order("set-lr", {"value": rate.before, "schedule": "set"})
    if rate.schedule == "set":
        raise NoInverse("it made the rate constant; the schedule can't be restored")
    if not rate.before or not rate.after or not run.learning_rate:
        raise NoInverse("a learning rate of 0 can't be scaled back")
    return Order("set-lr", {"value": run.learning_rate * rate.before / rate.after, "schedule": "scale"})


def _set_global_batch_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    unit = state.run.sample_unit if state.run else SAMPLES
    value = FormField("value", f"{unit} per step", str(state.run.global_batch or "") if state.run else "")
    return value, FormField("schedule", "schedule", "set", ("set", "scale"))


def _set_global_batch_undo(event: Event, run: RunView) -> Order:
    batch = event.data
    if not isinstance(batch, GlobalBatchChanged) or batch.before < 1:
        raise NoInverse("the previous global batch isn't known")
    if batch.before == run.global_batch:
        raise NoInverse(f"the global batch is already {run.global_batch} again")
    return Order("set-global-batch", {"value": batch.before, "schedule": batch.schedule})


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


def _admit_undo(event: Event, run: RunView) -> Order:
    node, views = _node_of_command(event, run)
    if all(view.is_held for view in views):
        raise NoInverse(f"{node} is already out again")
    return Order("drain", {}, node)


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


DESCRIPTIONS = (
    VerbDescription(
        "rebalance",
        title="split the global batch",
        changes="the samples each node takes (speed only)",
        keeps="loss, global batch, learning rate, micro-batches unless auto",
        blocked=lambda state: (
            "one rank takes the whole batch: nothing to split"
            if len(state.run.live_ranks if state.run else ()) < 2
            else ""
        ),
        undo=_rebalance_undo,
        against_plan=True,
        dialog="split",
        key=VerbKey("s", "split", "samples per node", 20),
    ),
    VerbDescription(
        "resize-batch",
        title="resize micro-batch",
        changes="samples per forward/backward pass (speed and memory)",
        keeps="loss, global batch, learning rate",
        fields=_resize_batch_fields,
        changes_nothing=_resize_batch_changes_nothing,
        undo=_resize_batch_undo,
        against_plan=True,
        key=VerbKey("b", "batch", "a node's micro-batch", 10),
    ),
    VerbDescription(
        "set-lr",
        title="learning rate",
        changes="the optimisation, from the step where it applies",
        keeps="batch, shares, micro-batches",
        fields=_set_lr_fields,
        changes_nothing=_set_lr_changes_nothing,
        undo=_set_lr_undo,
        undo_remark=lambda order: (
            "this is the rate at the step where it applies; the rest of the schedule scales with it"
            if order.args["schedule"] == "scale"
            else ""
        ),
        against_plan=True,
        key=VerbKey("l", "lr", "learning rate", 30),
    ),
    VerbDescription(
        "set-global-batch",
        title="global batch",
        changes="the optimisation: samples per step over all ranks",
        keeps="micro-batches",
        fields=_set_global_batch_fields,
        changes_nothing=lambda order, run: order.args.get("value") == run.global_batch,
        undo=_set_global_batch_undo,
        against_plan=True,
        key=VerbKey("g", "global batch", "samples per step", 90, shown=False),
    ),
    VerbDescription(
        "drain",
        title="drain a node",
        changes="the node leaves the group; the others take its samples",
        keeps="the curve; the node's trainer waits for admit",
        fields=lambda state, rank: (node_field([view for view in _ranks(state) if view.state != "drained"], rank),),
        undo=_drain_undo,
    ),
    VerbDescription(
        "admit",
        title="admit a node",
        changes="the node rejoins the group and is brought up to date",
        keeps="the curve, the global batch",
        fields=lambda state, rank: (node_field([view for view in _ranks(state) if view.is_held], rank),),
        no_nodes="no node is drained or failed",
        undo=_admit_undo,
        undo_remark=lambda order: "its new share follows from its last rate and may differ from the old one",
    ),
    VerbDescription(
        "promote",
        title="make a node the lead",
        changes="who leads: the lead hands over, or a majority votes if it is gone",
        keeps="the curve, ranks and shares (costs one fence)",
        fields=_promote_fields,
        no_nodes="no other node has a rank of the run",
        preview=_promote_preview,
        undo=_promote_undo,
        ask="do it?",
    ),
)
