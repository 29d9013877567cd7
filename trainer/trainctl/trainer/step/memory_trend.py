"""Memory trend of a rank over its last steps: use of its cap, and growth."""

from collections import deque
from typing import Final

from trainctl.trainer.backends.base import Memory

STEPS: Final = 10
"""Steps over which the mean and the slope are taken."""
_MIDDLE: Final = (STEPS - 1) / 2
_SPREAD: Final = sum((step - _MIDDLE) ** 2 for step in range(STEPS))


class MemoryTrend:
    """Remembers the last peaks, with their sum and that of each times its place: a step costs the loop little."""

    def __init__(self) -> None:
        self._peaks: deque[int] = deque()
        self._sum = self._by_place = 0

    def add(self, memory: Memory) -> dict[str, float]:
        """With the peak of one more step: the mean peak over the cap, and the least-squares slope of the peaks in
        bytes a step; the latter not before STEPS are known. Nothing where no peak can be read."""
        peak, peaks = memory.peak_bytes, self._peaks
        if peak is None:
            return {}
        if len(peaks) == STEPS:
            self._sum -= peaks.popleft()
            self._by_place -= self._sum  # all others are one place nearer to the first
        self._by_place += len(peaks) * peak
        self._sum += peak
        peaks.append(peak)
        found = {"memory_use": self._sum / len(peaks) / memory.cap_bytes} if memory.cap_bytes else {}
        if len(peaks) == STEPS:
            found["memory_growth"] = (self._by_place - _MIDDLE * self._sum) / _SPREAD
        return found
