"""Fields, checks and phrases that the descriptions of several verbs share: pure."""

from collections.abc import Sequence

from trainctl.protocol import messages as m
from trainctl.tui.commands import predictions, shares
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import FormField
from trainctl.tui.state import series as s
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import clean

# ---------------------------------------------------------------- fields and checks


def node_field(views: Sequence[m.RankView], rank: int | None) -> FormField:
    """A choice among the nodes of these ranks; that of the selected rank comes first."""
    chosen = next((view.node for view in views if view.rank == rank), views[0].node if views else "")
    return FormField("node", "node", chosen, tuple(dict.fromkeys(view.node for view in views)))


def no_node(order: Order, run: m.RunView) -> str:
    """The node that isn't in the run, and those that are."""
    known = ", ".join(dict.fromkeys(clean(view.node) for view in run.ranks))
    return f"no node {order.node!r} in this run; the nodes are {known}"


# ---------------------------------------------------------------- phrases


def within(state: ViewState) -> str:
    """How long the step in progress may take yet."""
    usual = s.typical(state.lately("step_seconds"))
    active = state.run is not None and state.run.state == "running"
    return f", within about {f.seconds(usual)}" if active and usual is not None else ""


def joined(*parts: str) -> str:
    """Phrases one after the other, without the empty ones."""
    return "; ".join(part for part in parts if part)


def few(parts: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    more = f" and {len(parts) - 3} more" if len(parts) > 4 else ""
    return ", ".join(parts[:3] if more else parts) + more


def moved(before: Sequence[shares.Seat], after: Sequence[shares.Seat], wanted: Sequence[int], glyphs: Glyphs) -> str:
    """What each node of `after` has and gets, and the step and memory that makes; `before` is who takes part now."""
    changed = [
        f"{clean(seat.node)} {seat.share} {glyphs.arrow} {share}"
        for seat, share in zip(after, wanted, strict=True)
        if seat.share != share
    ]
    if not changed:
        return "same split as now; curve unchanged"
    return joined(few(changed), *outcome(before, after, wanted, glyphs), "curve unchanged")


def micros_changed(
    before: Sequence[shares.Seat], after: Sequence[shares.Seat], wanted: Sequence[int], glyphs: Glyphs
) -> str:
    """The micro-batches in force that change with these shares; empty if none of them was chosen."""
    parts = [
        f"{clean(old.node)} {old.micro_in_force} {glyphs.arrow} {min(new.micro_batch, share)}"
        for old, new, share in zip(before, after, wanted, strict=True)
        if new.micro_batch != old.micro_batch and min(new.micro_batch, share) != old.micro_in_force
    ]
    return f"micro-batch {few(parts)}" if parts else ""


def outcome(
    before: Sequence[shares.Seat], after: Sequence[shares.Seat], wanted: Sequence[int], glyphs: Glyphs
) -> tuple[str, str]:
    """The step's length with these shares, and whether they fit into the memory."""
    now, then = shares.group_seconds(before, [seat.share for seat in before]), shares.group_seconds(after, wanted)
    step = predictions.seconds_change(now, then, glyphs.arrow) or "step time isn't known yet"
    return step, predictions.fits(after, wanted, [seat.micro_batch for seat in after])
