"""States of the screens after the messages of a recorded agent."""

from collections.abc import Iterable
from typing import Any

from tests.tui.support.recorded import (
    CLOCK,
    CONNECTED,
    comings_and_goings,
    hung,
    live_hosts,
    run_view,
    shrunk,
    snapshot,
    under_way,
)

from trainctl.tui.state import reducer
from trainctl.tui.state.view_state import ViewState


def state_after(messages: Iterable[Any], state: ViewState | None = None) -> ViewState:
    state = state or ViewState()
    for message in messages:
        state = reducer.apply(state, message, CLOCK.at_monotonic)
    return state


def attached(nodes: int, *args: Any, **view: Any) -> ViewState:
    """Return the state right after the attach to a run of so many ranks."""
    run = run_view(nodes, *args, **view)
    return state_after([CONNECTED, snapshot(run), *live_hosts(run)])


FLEET = attached(4, step=18_240, steps=60_000)
ALONE = attached(1)
GROUP = state_after(under_way(run_view(3)))
MIXED = state_after(under_way(hung(run_view(3), 1)))
SHRUNK = state_after([*under_way(shrunk(run_view(3))), *comings_and_goings(run_view(3), seq=100)])
NOTHING = state_after([CONNECTED, snapshot(None)])
