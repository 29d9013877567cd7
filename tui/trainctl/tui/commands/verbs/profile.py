"""`profile`: what each operator takes in the next steps."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField, VerbDescription
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean


def _fields(state: ViewState, rank: int | None) -> tuple[FormField, ...]:
    return (
        FormField("steps", "steps", if_empty="3"),
        FormField("nodes", "nodes, separated by commas", if_empty="all nodes"),
    )


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    known = tuple(dict.fromkeys(view.node for view in live_ranks(run)))
    absent = [node for node in order.args.get("nodes", ()) if node not in known]
    if not absent:
        return ""
    return f"no rank of {clean(', '.join(absent))} is in the group; its nodes are {clean(', '.join(known))}"


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    steps, nodes = order.args.get("steps", 3), clean(", ".join(order.args.get("nodes", ()))) or "all nodes"
    which = f"the next {steps} steps" if steps != 1 else "the next step"
    return f"records {which} on {nodes} after one that warms up; these steps are slower; curve unchanged"


DESCRIPTION = VerbDescription(
    "profile",
    title="profile the next steps",
    changes="the profiled steps are slower; each rank writes a trace, and the screen Profile shows the operators",
    keeps="everything else, and the speed of later steps",
    fields=_fields,
    refused=_refused,
    preview=_preview,
    undo="a profile changes nothing",
)
