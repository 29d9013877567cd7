"""`rollback`: the run goes back to an earlier checkpoint, and may skip the samples that followed."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (
        FormField("steps", "at least so many steps back", "1"), FormField("skip_batches", "batches to skip", "0"),
    )  # fmt: skip


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    step, steps, skips = order.args.get("step"), order.args.get("steps", 1), order.args.get("skip_batches")
    latest = max(0, run.step - steps)
    where = f"to step {step:,}" if step is not None else f"to the newest checkpoint up to step {latest:,}"
    skipped = f"; doesn't train on the samples of the {skips:,} global batches after it" if skips else ""
    return f"goes back from step {run.step:,} {where}{skipped}: changes the curve"


DESCRIPTION = VerbDescription(
    "rollback",
    title="go back to a checkpoint",
    changes="the run continues from an earlier step; later steps are undone, and their checkpoints are set aside",
    keeps="the record of the undone steps, modes of policies",
    fields=_fields,
    preview=_preview,
    undo="the run doesn't return to steps that were undone",
    ask="go back?",
)
