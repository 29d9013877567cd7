"""Verbs that change the loss curve: the learning rate, the global batch. Pure."""

from trainctl.protocol.config.objectives import SAMPLES
from trainctl.protocol.messages import Event, RunView
from trainctl.protocol.messages.events import GlobalBatchChanged, LearningRateChanged
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import (
    FormField,
    NoInverse,
    VerbDescription,
    VerbKey,
)
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import scientific


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


SET_LR = VerbDescription(
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
)


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


SET_GLOBAL_BATCH = VerbDescription(
    "set-global-batch",
    title="global batch",
    changes="the optimisation: samples per step over all ranks",
    keeps="micro-batches",
    fields=_set_global_batch_fields,
    changes_nothing=lambda order, run: order.args.get("value") == run.global_batch,
    undo=_set_global_batch_undo,
    against_plan=True,
    key=VerbKey("g", "global batch", "samples per step", 90, shown=False),
)

DESCRIPTIONS = (SET_LR, SET_GLOBAL_BATCH)
