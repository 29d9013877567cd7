"""`resume`: training continues where it was paused."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import NoInverse, VerbDescription
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    return f"continues at step {run.step + 1:,} with plan v{run.plan_version}; curve unchanged"


def _undo(event: m.Event, run: m.RunView) -> Order:
    if run.state in ("pausing", "paused"):
        raise NoInverse(f"the run is already {run.state}")
    return Order("pause")


DESCRIPTION = VerbDescription(
    "resume",
    changes="training continues where it was paused",
    keeps="everything else",
    preview=_preview,
    undo=_undo,
)
