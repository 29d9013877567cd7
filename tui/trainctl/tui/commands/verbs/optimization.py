"""Verbs that change the loss curve: the learning rate, the global batch. Pure."""

from trainctl.protocol import messages as m
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.config.objectives import SAMPLES
from trainctl.protocol.messages.events import GlobalBatchChanged, LearningRateChanged
from trainctl.tui.commands import shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription, VerbKey
from trainctl.tui.commands.verb_parts import joined, outcome
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs


def _set_lr_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    rate = state.run.learning_rate if state.run else None
    value = FormField("value", "learning rate", f.scientific(rate) if rate is not None else "")
    return value, FormField("schedule", "schedule", "scale", ("scale", "set"))


def _set_lr_preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    value = float(order.args["value"])
    change = f"lr {f.scientific(run.learning_rate)} {glyphs.arrow} {f.scientific(value)}"
    if order.args.get("schedule", "scale") == "set":
        return f"{change}, constant from then on: changes the curve"
    times = f", the rest of the schedule {glyphs.times}{value / run.learning_rate:.3g}" if run.learning_rate else ""
    return f"{change}{times}: changes the curve"


def _set_lr_changes_nothing(order: Order, run: m.RunView) -> bool:
    if run.learning_rate is None:
        return False
    as_shown = float(f.scientific(run.learning_rate))
    is_same = order.args.get("value") in (run.learning_rate, as_shown)
    return is_same and order.args.get("schedule", "scale") == "scale"


def _set_lr_undo(event: m.Event, run: m.RunView) -> Order:
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


def _set_lr_undo_remark(order: Order) -> str:
    if order.args["schedule"] != "scale":
        return ""
    return "this is the rate at the step where it applies; the rest of the schedule scales with it"


SET_LR = VerbDescription(
    "set-lr",
    title="learning rate",
    changes="the optimisation, from the step where it applies",
    keeps="batch, shares, micro-batches",
    fields=_set_lr_fields,
    preview=_set_lr_preview,
    changes_nothing=_set_lr_changes_nothing,
    undo=_set_lr_undo,
    undo_remark=_set_lr_undo_remark,
    against_plan=True,
    key=VerbKey("l", "lr", "learning rate", 30),
)


def _set_global_batch_fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    unit = state.run.sample_unit if state.run else SAMPLES
    value = FormField("value", f"{unit} per step", str(state.run.global_batch or "") if state.run else "")
    return value, FormField("schedule", "schedule", "set", ("set", "scale"))


def _set_global_batch_refused(order: Order, state: ViewState, run: m.RunView) -> str:
    value, ranks = int(order.args["value"]), len(live_ranks(run))
    return f"{value} {run.sample_unit} are too few for {ranks} ranks; each needs at least one" if value < ranks else ""


def _set_global_batch_preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    """The shares grow in proportion, as the agent makes them."""
    value, now = int(order.args["value"]), run.global_batch
    scaled = order.args.get("schedule") == "scale"
    lr = f"lr {glyphs.times}{value / now:.3g}" if scaled and now else "lr scaled with it" if scaled else "lr unchanged"
    seats = shares.seats_of(state)
    wanted = apportion(value, {index: float(seat.share) for index, seat in enumerate(seats)}) if seats else {}
    made = outcome(seats, seats, tuple(wanted.values()), glyphs) if seats else ()
    return joined(f"G {f.figure(now, '{}')} {glyphs.arrow} {value}, {lr}: changes the curve", *made)


def _set_global_batch_changes_nothing(order: Order, run: m.RunView) -> bool:
    return order.args.get("value") == run.global_batch


def _set_global_batch_undo(event: m.Event, run: m.RunView) -> Order:
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
    changes_nothing=_set_global_batch_changes_nothing,
    undo=_set_global_batch_undo,
    against_plan=True,
    key=VerbKey("g", "global batch", "samples per step", 90, shown=False),
)

DESCRIPTIONS = (SET_LR, SET_GLOBAL_BATCH)
