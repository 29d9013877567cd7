"""The time of simulated ranks: a queue of what is to happen, which moves on only as things happen, or real time."""

import asyncio
import heapq
import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """The time that simulated ranks and groups see."""

    @property
    def now(self) -> float: ...
    def after(self, seconds: float, what: Callable[[], None]) -> None: ...


class RealTime:
    """Time that passes by itself: the running event loop does things when they are due."""

    def __init__(self) -> None:
        self.began_at, self._began_monotonic = time.time(), time.monotonic()

    @property
    def now(self) -> float:
        """Seconds since the simulation began."""
        return time.monotonic() - self._began_monotonic

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something so many seconds from now."""
        asyncio.get_running_loop().call_later(seconds, what)


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
