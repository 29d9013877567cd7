"""`stop`: the run ends."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, NoInverse, VerbDescription, VerbKey
from trainctl.tui.commands.verb_parts import within
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("checkpoint", "checkpoint first", "true", ("true", "false")),)


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    last = "with a checkpoint first" if order.args.get("checkpoint", True) else "WITHOUT a checkpoint"
    return f"ends after step {run.step + 1:,}{within(state)}, {last}"


def _undo(event: m.Event, run: m.RunView) -> Order:
    if run.state in m.ACTIVE_RUN_STATES:
        raise NoInverse("the run is already continuing")
    return Order("start-run", {"resume": run.run})


DESCRIPTION = VerbDescription(
    "stop",
    changes="the run ends after the step in progress",
    keeps="its record and checkpoints; it can be resumed",
    fields=_fields,
    preview=_preview,
    undo=_undo,
    ask="stop it?",
    key=VerbKey("x", "stop", "stop the run", 60),
)
