"""`sample`: the model answers prompts, now."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription, VerbKey
from trainctl.tui.commands.verb_parts import no_node
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (
        FormField("prompt", "prompt"), FormField("max_tokens", "max tokens"), FormField("temperature", "temperature"),
    )  # fmt: skip


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    nodes = {view.node for view in live_ranks(run)}
    return no_node(order, run) if order.node is not None and order.node not in nodes else ""


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    what = "the prompt" if order.args.get("prompt") else "the run file's prompts"
    return f"one rank answers {what} after step {run.step:,} while the others wait; curve unchanged"


DESCRIPTION = VerbDescription(
    "sample",
    title="sample the model",
    changes="the model answers at the next step boundary",
    keeps="everything else",
    fields=_fields,
    refused=_refused,
    preview=_preview,
    undo="an answer changes nothing",
    key=VerbKey("i", "sample", "sample the model", 95, shown=False),
)
