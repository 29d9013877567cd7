"""`checkpoint`: one is written at the next step boundary."""

from trainctl.protocol import messages as m
from trainctl.protocol.messages import event_prose
from trainctl.protocol.messages.events import CheckpointWritten
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import VerbDescription, VerbKey
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    return f"writes step {run.step:,} or the next one; {_last(state)}; curve unchanged"


def _last(state: ViewState) -> str:
    """`the last one: 0.3 GB, loop paused 14 ms`."""
    for event in reversed(state.run_events):
        if isinstance(event.data, CheckpointWritten) and event.data.size_bytes is not None:
            return f"the last one: {event_prose.checkpoint_cost(event.data).removeprefix(', ')}"
    return "its size isn't known until the first one"


DESCRIPTION = VerbDescription(
    "checkpoint",
    changes="a checkpoint is written at the next step boundary",
    keeps="everything else",
    preview=_preview,
    undo="a written checkpoint stays",
    key=VerbKey("c", "ckpt", "write a checkpoint", 40),
)
