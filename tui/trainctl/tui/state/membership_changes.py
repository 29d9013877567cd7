"""Which generations were formed of other ranks than the one before, by the run's events: pure."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from trainctl.protocol import messages as m

_FORMED = re.compile(r"(g\d+\.\d+) formed, (\d+) ranks?\b")
_MEMBERSHIP = re.compile(r" (is lost|joins again): ")


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
        moved = moved or (event.kind == "rank" and _MEMBERSHIP.search(event.text) is not None)
        formed = _FORMED.match(event.text) if event.kind == "run" else None
        if formed is None:
            continue
        if event.step and (moved or count not in (0, int(formed[2]))):
            made[event.step + 1] = Change(event.step + 1, formed[1])
        count, moved = int(formed[2]), False
    return list(made.values())
