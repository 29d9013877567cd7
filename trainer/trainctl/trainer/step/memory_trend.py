"""How near a rank's memory comes to its cap, and whether it grows, over its last steps."""

from collections import deque
from typing import Final

from trainctl.trainer.backends.base import Memory

STEPS: Final = 10
"""Steps that the mean and the slope are of."""


class MemoryTrend:
    """Remembers the last peaks."""

    def __init__(self) -> None:
        self._peaks: deque[int] = deque(maxlen=STEPS)

    def add(self, memory: Memory) -> dict[str, float]:
        """With the peak of one more step: the mean peak over the cap, and the least-squares slope of the peaks in
        bytes a step; the latter not before STEPS are known. Nothing where no peak can be read."""
        if memory.peak_bytes is None:
            return {}
        self._peaks.append(memory.peak_bytes)
        mean = sum(self._peaks) / len(self._peaks)
        found = {"memory_use": mean / memory.cap_bytes} if memory.cap_bytes else {}
        if len(self._peaks) == STEPS:
            middle = (STEPS - 1) / 2
            rise = sum((at - middle) * (peak - mean) for at, peak in enumerate(self._peaks))
            found["memory_growth"] = rise / sum((at - middle) ** 2 for at in range(STEPS))
        return found
