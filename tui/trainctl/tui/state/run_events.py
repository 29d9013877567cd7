"""Events of a run: one in words, and the changes that they made. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from trainctl.protocol.messages import Event, event_prose
from trainctl.protocol.messages.events import (
    CommandApplied,
    GenerationFormed,
    MicroBatchChanged,
    NodeStateChanged,
    SharesChanged,
)
from trainctl.protocol.messages.verbs import Knob, knobs

_OF_SPEED: frozenset[Knob] = frozenset({"shares", "micro-batch"})
"""The settings that a step's length depends on."""


def took_effect(event: Event) -> bool:
    """Return whether the event is of something that was applied at a step, and left it other than it was."""
    applied = event.step is not None and event.outcome in (None, "applied")
    return applied and (event.before is None or event.before != event.after)


def changes_speed(event: Event) -> bool:
    """Return whether it gave ranks other shares or micro-batches, by a command or by itself."""
    return not _OF_SPEED.isdisjoint(knobs(event.verb)) and took_effect(event)


def changed_step(events: Iterable[Event], run: str) -> int:
    """Return the step of the run's last such event; 0 where none is known."""
    return max((event.step or 0 for event in events if event.run == run and changes_speed(event)), default=0)


def node_of(event: Event) -> str | None:
    """Return the node that a command was for; None: the run, or it isn't known."""
    match event.data:
        case SharesChanged(node=node) | NodeStateChanged(node=node) | CommandApplied(node=node):
            return node or None
        case MicroBatchChanged(before=before) if len({node for node, _ in before}) == 1:
            return before[0][0] or None
        case _:
            return None


@dataclass(frozen=True)
class Change:
    """A generation whose ranks are not those before it, and the first step it makes."""

    step: int
    generation: str  # g1.4


def changes_of_ranks(events: Iterable[Event]) -> list[Change]:
    """Return the changes by one run's events, oldest first; of several at one step the newest. What is formed before
    the first step is no change, nor is one that the same ranks form again, as after a pause."""
    made: dict[int, Change] = {}
    count, moved = 0, False  # of ranks, 0: not known; whether one was lost or is back since the last formation
    for event in events:
        match event.data:
            case SharesChanged(lost=lost, returned=returned, refused=False) if lost or returned:
                moved = True
            case GenerationFormed() as formed:
                if event.step and (moved or count not in (0, formed.count)):
                    made[event.step + 1] = Change(event.step + 1, str(formed.generation))
                count, moved = formed.count, False
            case _:
                pass
    return list(made.values())


def event_words(event: Event, arrow: str = event_prose.ARROW) -> str:
    """Return what it says, and at which step unless that is part of it."""
    is_said = getattr(event.data, "step", None) is not None
    step = "" if event.step is None or is_said else f" @{event.step:,}"
    return event.text.replace(event_prose.ARROW, arrow) + step


def event_fields(event: Event) -> dict[str, Any]:
    """Return the event for a script: its fields, and beside its data the same in words."""
    event_words = {"kind": event.kind, "text": event.text, "before": event.before, "after": event.after}
    return {**msgspec.to_builtins(event), **event_words}
