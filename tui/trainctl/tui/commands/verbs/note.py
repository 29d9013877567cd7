"""`note`: a line in the run's events."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription, VerbKey
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (FormField("text", "text"),)


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    return f"recorded in the run's events at step {run.step:,}; curve unchanged"


DESCRIPTION = VerbDescription(
    "note",
    changes="a line in the run's events",
    keeps="everything else",
    acts_on="any run",
    fields=_fields,
    preview=_preview,
    undo="a note stays in the record",
    key=VerbKey("n", "note", "write a note", 70),
)
