"""`set-global-batch`: samples a step over all ranks."""

from trainctl.protocol import messages as m
from trainctl.protocol.batch.apportion import apportion
from trainctl.protocol.config.objectives import SAMPLES
from trainctl.protocol.messages.events import GlobalBatchChanged
from trainctl.tui.commands import shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription, VerbKey
from trainctl.tui.commands.verb_parts import joined, outcome
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    unit = state.run.sample_unit if state.run else SAMPLES
    value = FormField("value", f"{unit} per step", str(state.run.global_batch or "") if state.run else "")
    return value, FormField("schedule", "schedule", "set", ("set", "scale"))


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    value, ranks = int(order.args["value"]), len(live_ranks(run))
    return f"{value} {run.sample_unit} are too few for {ranks} ranks; each needs at least one" if value < ranks else ""


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    """The shares grow in proportion, as the agent makes them."""
    value, now = int(order.args["value"]), run.global_batch
    scaled = order.args.get("schedule") == "scale"
    lr = f"lr {glyphs.times}{value / now:.3g}" if scaled and now else "lr scaled with it" if scaled else "lr unchanged"
    seats = shares.seats_of(state)
    wanted = apportion(value, {index: float(seat.share) for index, seat in enumerate(seats)}) if seats else {}
    made = outcome(seats, seats, tuple(wanted.values()), glyphs) if seats else ()
    return joined(f"G {f.figure(now, '{}')} {glyphs.arrow} {value}, {lr}: changes the curve", *made)


def _changes_nothing(order: Order, run: m.RunView) -> bool:
    return order.args.get("value") == run.global_batch


def _undo(event: m.Event, run: m.RunView) -> Order:
    batch = event.data
    if not isinstance(batch, GlobalBatchChanged) or batch.before < 1:
        raise NoInverse("the previous global batch isn't known")
    if batch.before == run.global_batch:
        raise NoInverse(f"the global batch is already {run.global_batch} again")
    return Order("set-global-batch", {"value": batch.before, "schedule": batch.schedule})


DESCRIPTION = VerbDescription(
    "set-global-batch",
    title="global batch",
    changes="the optimisation: samples per step over all ranks",
    keeps="micro-batches",
    fields=_fields,
    refused=_refused,
    preview=_preview,
    changes_nothing=_changes_nothing,
    undo=_undo,
    against_plan=True,
    key=VerbKey("g", "global batch", "samples per step", 90, shown=False),
)
