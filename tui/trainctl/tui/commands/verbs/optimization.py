"""Verbs that change the loss curve: the learning rate, the global batch. Pure."""

from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config.objectives import SAMPLES
from trainctl.protocol.messages import Event, RunView
from trainctl.protocol.messages.events import GlobalBatchChanged, LearningRateChanged
from trainctl.tui.commands import shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import (
    FormField,
    NoInverse,
    Proposal,
    VerbDescription,
    VerbKey,
    joined,
    outcome,
)
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import figure, scientific


def _set_lr_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    rate = state.run.learning_rate if state.run else None
    value = FormField("value", "learning rate", scientific(rate) if rate is not None else "")
    return value, FormField("schedule", "schedule", "scale", ("scale", "set"))


def _set_lr_preview(proposal: Proposal) -> str:
    args, rate = proposal.order.args, proposal.run.learning_rate
    value = float(args["value"])
    change = f"lr {scientific(rate)} → {scientific(value)}"
    if args.get("schedule", "scale") == "set":
        return f"{change}, constant from then on: changes the curve"
    times = f", the rest of the schedule ×{value / rate:.3g}" if rate else ""
    return f"{change}{times}: changes the curve"


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


SET_LR = VerbDescription(
    "set-lr",
    title="learning rate",
    changes="the optimisation, from the step where it applies",
    keeps="batch, shares, micro-batches",
    fields=_set_lr_fields,
    preview=_set_lr_preview,
    changes_nothing=_set_lr_changes_nothing,
    undo=_set_lr_undo,
    undo_remark=lambda order: (
        "this is the rate at the step where it applies; the rest of the schedule scales with it"
        if order.args["schedule"] == "scale"
        else ""
    ),
    against_plan=True,
    key=VerbKey("l", "lr", "learning rate", 30),
)


def _set_global_batch_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    unit = state.run.sample_unit if state.run else SAMPLES
    value = FormField("value", f"{unit} per step", str(state.run.global_batch or "") if state.run else "")
    return value, FormField("schedule", "schedule", "set", ("set", "scale"))


def _set_global_batch_refused(proposal: Proposal) -> str:
    value, ranks, unit = int(proposal.order.args["value"]), len(live_ranks(proposal.run)), proposal.run.sample_unit
    return f"{value} {unit} are too few for {ranks} ranks; each needs at least one" if value < ranks else ""


def _set_global_batch_preview(proposal: Proposal) -> str:
    """Return what the batch would do; shares grow in proportion, as the agent makes them."""
    args, now = proposal.order.args, proposal.run.global_batch
    value, scaled = int(args["value"]), args.get("schedule") == "scale"
    lr = f"lr ×{value / now:.3g}" if scaled and now else "lr scaled with it" if scaled else "lr unchanged"
    seats = shares.seats_of(proposal.state)
    wanted = apportion(value, {index: float(seat.share) for index, seat in enumerate(seats)}) if seats else {}
    made = outcome(seats, seats, tuple(wanted.values())) if seats else ()
    return joined(f"G {figure(now, '{}')} → {value}, {lr}: changes the curve", *made)


def _set_global_batch_undo(event: Event, run: RunView) -> Order:
    batch = event.data
    if not isinstance(batch, GlobalBatchChanged) or batch.before < 1:
        raise NoInverse("the previous global batch isn't known")
    if batch.before == run.global_batch:
        raise NoInverse(f"the global batch is already {run.global_batch} again")
    return Order("set-global-batch", {"value": batch.before, "schedule": batch.schedule})


SET_GLOBAL_BATCH = VerbDescription(
    "set-global-batch",
    title="global batch",
    changes="the optimisation: samples per step over all ranks",
    keeps="micro-batches",
    fields=_set_global_batch_fields,
    refused=_set_global_batch_refused,
    preview=_set_global_batch_preview,
    changes_nothing=lambda order, run: order.args.get("value") == run.global_batch,
    undo=_set_global_batch_undo,
    against_plan=True,
    key=VerbKey("g", "global batch", "samples per step", 90, shown=False),
)

DESCRIPTIONS = (SET_LR, SET_GLOBAL_BATCH)
