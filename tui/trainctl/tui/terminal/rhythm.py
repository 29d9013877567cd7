"""When the screen is repainted for new data: a moment after a step has come, at most twice a second, and less often
where that would cost too much. Pure."""

import math

SLOWEST_SECONDS = 0.95
"""What arrives is still shown within a second."""
SETTLED_SECONDS = 0.05
"""After a step's first word, for what its ranks say of it."""
IDLE_SECONDS = 1.2
"""Between two repaints with nothing new, for the ages."""
DEAR, CHEAP = 0.025, 0.015
"""Shares of a core from which on the pause between repaints grows, and under which it shrinks again."""
STEP = 1.25


class Rhythm:
    """The pause between two repaints, led by what has come and by the processor time that the whole program takes."""

    def __init__(self, quickest_seconds: float) -> None:
        self._quickest = self.seconds = quickest_seconds
        self._before: tuple[float, float] | None = None
        self._began = -math.inf
        self._first = self._prompt = math.inf  # when something came first, and something that is shown promptly

    @property
    def due(self) -> float:
        """When to repaint next, by the monotonic clock."""
        wanted = min(self._prompt + SETTLED_SECONDS, self._first + SLOWEST_SECONDS, self._began + IDLE_SECONDS)
        return max(wanted, self._began + self.seconds)

    def told(self, now: float, *, prompt: bool) -> bool:
        """Something has come, which is to be shown promptly or within a second; whether `due` is another now."""
        before = self.due
        self._first = min(self._first, now)
        if prompt:
            self._prompt = min(self._prompt, now)
        return self.due != before

    def begun(self, now: float) -> None:
        """A repaint begins, of all that has come."""
        self._began = now
        self._first = self._prompt = math.inf

    def after(self, cpu_seconds: float, now: float) -> None:
        """Told after each repaint: by the processor time taken so far, and a monotonic clock."""
        if self._before is not None and now > self._before[1]:
            share = (cpu_seconds - self._before[0]) / (now - self._before[1])
            if share > DEAR:
                self.seconds = min(self.seconds * STEP, SLOWEST_SECONDS)
            elif share < CHEAP:
                self.seconds = max(self.seconds / STEP, self._quickest)
        self._before = cpu_seconds, now
