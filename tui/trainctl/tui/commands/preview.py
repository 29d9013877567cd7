"""What a command would do to the run as it is now, in one line, or why the agent will refuse it: pure."""

from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.commands import verb_registry
from trainctl.tui.commands.command import Order
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Piece, clean


def preview(order: Order, state: ViewState, glyphs: Glyphs) -> Piece:
    """In one line what the command would do to the run now; or, marked as bad, why the agent will refuse it."""
    problem, described, run = _refusal(order, state), verb_registry.of(order.verb), state.run
    if problem:
        return Piece(problem, "bad")
    if run is None or described.preview is None:
        return Piece(VERBS[order.verb].summary, "strong")
    return Piece(described.preview(order, state, run, glyphs), "strong")


def changes_nothing(order: Order, state: ViewState) -> bool:
    """Whether all is as the command would have it already."""
    return state.run is not None and verb_registry.of(order.verb).changes_nothing(order, state.run)


def _refusal(order: Order, state: ViewState) -> str:
    """What the agent can already be seen to refuse it for, as far as that shows here."""
    described, run = verb_registry.of(order.verb), state.run
    if run is None:
        return "no active run" if described.acts_on in ("active run", "any run") else ""
    if why := run.why_not(order.verb):
        return clean(why)
    if described.acts_on == "active run" and not state.active:
        return f"the run has {'failed' if run.state == 'failed' else 'ended'}"
    return described.refused(order, state, run)
