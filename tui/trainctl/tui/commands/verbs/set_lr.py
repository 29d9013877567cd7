"""`set-lr`: the learning rate."""

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import LearningRateChanged
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription, VerbKey
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    rate = state.run.learning_rate if state.run else None
    value = FormField("value", "learning rate", f.scientific(rate) if rate is not None else "")
    return value, FormField("schedule", "schedule", "scale", ("scale", "set"))


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    value = float(order.args["value"])
    change = f"lr {f.scientific(run.learning_rate)} {glyphs.arrow} {f.scientific(value)}"
    if order.args.get("schedule", "scale") == "set":
        return f"{change}, constant from then on: changes the curve"
    times = f", the rest of the schedule {glyphs.times}{value / run.learning_rate:.3g}" if run.learning_rate else ""
    return f"{change}{times}: changes the curve"


def _changes_nothing(order: Order, run: m.RunView) -> bool:
    if run.learning_rate is None:
        return False
    as_shown = float(f.scientific(run.learning_rate))
    is_same = order.args.get("value") in (run.learning_rate, as_shown)
    return is_same and order.args.get("schedule", "scale") == "scale"


def _undo(event: m.Event, run: m.RunView) -> Order:
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


def _undo_remark(order: Order) -> str:
    if order.args["schedule"] != "scale":
        return ""
    return "this is the rate at the step where it applies; the rest of the schedule scales with it"


DESCRIPTION = VerbDescription(
    "set-lr",
    title="learning rate",
    changes="the optimisation, from the step where it applies",
    keeps="batch, shares, micro-batches",
    fields=_fields,
    preview=_preview,
    changes_nothing=_changes_nothing,
    undo=_undo,
    undo_remark=_undo_remark,
    against_plan=True,
    key=VerbKey("l", "lr", "learning rate", 30),
)
