"""`evaluate`: the loss on the held-out samples, now."""

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import Evaluated
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import VerbDescription, VerbKey
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    return f"{_last(state, run)}; curve unchanged"


def _last(state: ViewState, run: m.RunView) -> str:
    """`the last one: 1.903 @18,122, took 2.10 s`."""
    if run.eval_loss is None or run.eval_step is None:
        return "no earlier evaluation to predict its duration from"
    made = (event.data for event in reversed(state.run_events) if isinstance(event.data, Evaluated))
    seconds = next((data.seconds for data in made if data.seconds is not None), None)
    took = f", took {f.seconds(seconds)}" if seconds is not None else ""
    return f"the last one: {f.loss(run.eval_loss)} @{run.eval_step:,}{took}"


DESCRIPTION = VerbDescription(
    "evaluate",
    changes="the held-out loss is measured at the next step boundary",
    keeps="everything else",
    preview=_preview,
    undo="an evaluation changes nothing",
    key=VerbKey("e", "eval", "evaluate now", 80),
)
