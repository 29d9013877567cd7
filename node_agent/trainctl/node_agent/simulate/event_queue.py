"""Simulated time: what is to happen, in order. It moves on only as things happen."""

import heapq
from collections.abc import Callable


class EventQueue:
    """Things to be done at their times; those of the same time in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds since the simulation began
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._added = 0

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something so many seconds from now."""
        self._added += 1
        heapq.heappush(self._waiting, (self.now + seconds, self._added, what))

    def step(self) -> bool:
        """Do the next thing; False if there is none."""
        if not self._waiting:
            return False
        self.now, _, what = heapq.heappop(self._waiting)
        what()
        return True
