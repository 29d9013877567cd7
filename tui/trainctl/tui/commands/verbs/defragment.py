"""`defragment`: the allocators' caches are cleared, now."""

from trainctl.protocol import messages as m
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import VerbDescription
from trainctl.tui.commands.verb_parts import no_node
from trainctl.tui.state.rank_speed import live_ranks
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs


def _refused(order: Order, state: ViewState, run: m.RunView) -> str:
    nodes = {view.node for view in live_ranks(run)}
    return no_node(order, run) if order.node is not None and order.node not in nodes else ""


def _preview(order: Order, state: ViewState, run: m.RunView, glyphs: Glyphs) -> str:
    return f"clears caches on {order.node or 'all nodes'}; the next steps may be slower; curve unchanged"


DESCRIPTION = VerbDescription(
    "defragment",
    title="clear the allocators' caches",
    changes="memory that no array uses is given back to the device at the next step boundary",
    keeps="everything else",
    refused=_refused,
    preview=_preview,
    undo="clearing caches changes nothing",
)
