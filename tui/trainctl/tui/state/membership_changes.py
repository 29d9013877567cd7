"""Which generations were formed of other ranks than the one before, by the run's events: pure."""

from collections.abc import Iterable
from typing import NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import GenerationFormed, SharesChanged


class Change(NamedTuple):
    """A generation whose ranks are not those before it, and the first step it makes."""

    step: int
    generation: str  # g1.4


def changes_of_ranks(events: Iterable[m.Event]) -> list[Change]:
    """Of one run's events, oldest first; of several at one step the newest. What is formed before the first step is no
    change, nor is one that the same ranks form again, as after a pause."""
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
