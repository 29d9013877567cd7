"""The inverse command of an event, or why there is none. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainctl.protocol.messages import ACTIVE_RUN_STATES, Event, RunView
from trainctl.protocol.messages.verbs import VERBS, Knob, knobs
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.verb_description import NoInverse
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.state import run_events
from trainctl.tui.state.run_events import node_of

_BY_NODE: frozenset[Knob] = frozenset({"micro-batch"})
"""Settings that each node has for itself: a change on one node doesn't touch another's."""


@dataclass(frozen=True)
class Inverse:
    """The command that undoes `event`; `since` are the later ones that changed the same thing."""

    event: Event
    order: Order
    since: tuple[Event, ...] = ()

    @property
    def says(self) -> str:
        """Return what it undoes."""
        return f"undoes {run_events.event_words(self.event)}"

    @property
    def remarks(self) -> tuple[str, ...]:
        """Return what came since, newest first, and what won't be quite as it was."""
        made = [f"changed since: {run_events.event_words(event)} by {event.by}" for event in reversed(self.since[-2:])]
        if len(self.since) > 2:
            made.append(f"and {len(self.since) - 2} more")
        remark = DESCRIPTIONS[self.order.verb].undo_remark(self.order)
        return (*made, remark) if remark else tuple(made)


def of(event: Event, run: RunView | None, events: Sequence[Event]) -> Inverse:
    """Return what undoes the event now. Raises NoInverse with the reason."""
    if event.verb is None:
        raise NoInverse("it isn't a change")
    described = DESCRIPTIONS.get(event.verb)
    if described is None:
        raise NoInverse(f"{event.verb} can't be undone")
    if isinstance(described.undo, str):
        raise NoInverse(described.undo)
    if event.outcome not in (None, "applied"):
        raise NoInverse(f"it changed nothing: {event.outcome}")
    if not run_events.took_effect(event):
        raise NoInverse("it changed nothing: already set")
    if run is None or event.run not in ("", run.run):
        raise NoInverse("it belongs to another run")
    by = undone_by(events).get(event.id)
    if by is not None:
        raise NoInverse(f"{by.by} already undid it, @{by.step or 0:,}; undo that one instead")
    undoing = DESCRIPTIONS[VERBS[event.verb].inverse or event.verb]
    if undoing.acts_on == "active run" and run.state not in ACTIVE_RUN_STATES:
        raise NoInverse("the run has ended")
    order = described.undo(event, run)
    return Inverse(event, replace(order, undoes=event.command or str(event.id)), _since(event, events))


def newest(run: RunView | None, events: Sequence[Event], most: int = 9) -> list[Inverse]:
    """Return the newest events that can be undone, newest first."""
    inverses: list[Inverse] = []
    for event in reversed(events):
        try:
            inverses.append(of(event, run, events))
        except NoInverse:
            continue
        if len(inverses) == most:
            break
    return inverses


# ---------------------------------------------------------------- which command undid which


def undone_by(events: Sequence[Event]) -> dict[int, Event]:
    """Return by its number each event that was undone, and the event that did it."""
    by_key = {key: event.id for event in events for key in (event.command, str(event.id)) if key}
    undoing = (event for event in events if event.undoes and run_events.took_effect(event))
    return {by_key[event.undoes]: event for event in undoing if event.undoes in by_key}


def undid(events: Sequence[Event]) -> dict[int, Event]:
    """Return by the number of an undoing event the event that it undid."""
    by_id = {event.id: event for event in events}
    return {by.id: by_id[number] for number, by in undone_by(events).items()}


def _since(event: Event, events: Sequence[Event]) -> tuple[Event, ...]:
    own = knobs(event.verb)
    node = node_of(event) if own <= _BY_NODE else None

    def touches(other: Event) -> bool:
        shared = own & knobs(other.verb)
        return bool(shared) and (node is None or not shared <= _BY_NODE or node_of(other) in (None, node))

    return tuple(
        other
        for other in events
        if (other.at, other.id) > (event.at, event.id) and touches(other) and run_events.took_effect(other)
    )
