"""Which events a chart marks: the last commands that took effect, by number, and generations of other ranks. Pure."""

from trainctl.tui.charts.marks import Mark
from trainctl.tui.state import plan_changes
from trainctl.tui.state.membership_changes import Change, changes_of_ranks
from trainctl.tui.state.view_state import ViewState

MAX_MARKS = 9
_UNMARKED = (None, "note", "acknowledge", "mute")
"""Commands that leave the training alone get no number."""


def numbered(state: ViewState) -> dict[int, str]:
    """Event id -> number, for the last nine commands that took effect; the charts carry the same numbers. It is the
    id, so that it stays as it is when more commands come, and is the same to everyone."""
    effective = [
        event.id
        for event in state.run_events
        if event.kind == "command" and plan_changes.took_effect(event) and event.verb not in _UNMARKED
    ]
    return {event: str(event) for event in effective[-MAX_MARKS:]}


def marks(state: ViewState) -> tuple[Mark | Change, ...]:
    """The numbered events as chart marks, and the last generations that were formed of other ranks."""
    numbers = numbered(state)
    commands = (
        Mark(event.step, numbers[event.id])
        for event in state.run_events
        if event.id in numbers and event.step is not None
    )
    return (*commands, *changes_of_ranks(state.run_events)[-MAX_MARKS:])
