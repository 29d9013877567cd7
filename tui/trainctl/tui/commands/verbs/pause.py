"""`pause`: training waits after the step in progress."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import NoInverse, VerbDescription, VerbKey
from trainctl.tui.commands.verb_parts import within
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs

_PAUSED = ("pausing", "paused")


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    return f"pauses after step {run.step + 1:,}{within(state)}; curve unchanged"


def _undo(event: m.Event, run: m.RunView) -> Order:
    if run.state not in _PAUSED:
        raise NoInverse(f"the run is already {run.state}")
    return Order("resume")


def _stands_for(state: ViewState) -> str:
    """Of a run that is paused, the key has it go on."""
    return "resume" if state.run is not None and state.run.state in _PAUSED else "pause"


DESCRIPTION = VerbDescription(
    "pause",
    changes="training waits after the step in progress",
    keeps="the run, its plan and its memory; resume continues",
    preview=_preview,
    undo=_undo,
    key=VerbKey("p", "pause", "pause or resume", 50, stands_for=_stands_for),
)
