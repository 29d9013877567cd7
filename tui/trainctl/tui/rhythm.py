"""How often the screen is repainted for new data: twice a second, or less often where that would cost too much."""

SLOWEST_SECONDS = 0.95
"""What arrives is still shown within a second."""
DEAR, CHEAP = 0.025, 0.015
"""Shares of a core from which on the pause between repaints grows, and under which it shrinks again."""
STEP = 1.25


class Rhythm:
    """The pause between two repaints, led by the processor time that the whole program takes."""

    def __init__(self, quickest_seconds: float) -> None:
        self._quickest = self.seconds = quickest_seconds
        self._before: tuple[float, float] | None = None

    def after(self, cpu_seconds: float, now: float) -> float:
        """The next pause, told after each repaint: by the processor time taken so far, and a monotonic clock."""
        if self._before is not None and now > self._before[1]:
            share = (cpu_seconds - self._before[0]) / (now - self._before[1])
            if share > DEAR:
                self.seconds = min(self.seconds * STEP, SLOWEST_SECONDS)
            elif share < CHEAP:
                self.seconds = max(self.seconds / STEP, self._quickest)
        self._before = cpu_seconds, now
        return self.seconds
