"""Statistics over a window of a run's newest steps: mean, deviation, median, scatter, robust z and trend."""

import math
from bisect import bisect_left, insort
from collections import deque
from operator import mul
from statistics import median
from typing import Final

WINDOW_STEPS: Final = 100
"""Default number of values in a window."""
MAD_SCALE: Final = 1.4826
"""Factor from the median absolute deviation to the standard deviation of normal scatter (Rousseeuw and Croux, 1993)."""
LARGEST: Final = 1e300
"""Values from here on count as infinite, as in the record's rollups: a sum of many stays finite."""


def is_usable(value: float | None) -> bool:
    """Return whether statistics can use a value: it is known, and neither NaN nor infinite."""
    return value is not None and abs(value) < LARGEST


class RollingStatistics:
    """The newest `window` finite values of a curve, each with its step. Adding one costs a few microseconds.

    Steps come in order. A step that was made again takes the place of itself and of all steps after it. Each statistic
    is None as long as too few values are known for it; `is_full` says whether the window is full.
    """

    def __init__(self, window: int = WINDOW_STEPS) -> None:
        """`window`: number of values, at least 2."""
        self._window = window
        self._steps: deque[int] = deque()
        self._values: deque[float] = deque()
        self._sorted: list[float] = []
        self._centred: tuple[float, ...] = ()  # steps of a window without gaps, minus their mean
        self._spread = 0.0  # the sum of their squares

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_full(self) -> bool:
        return len(self._values) == self._window

    @property
    def values(self) -> list[float]:
        """The values, oldest first."""
        return [*self._values]

    @property
    def last_step(self) -> int | None:
        """The step of the newest value."""
        return self._steps[-1] if self._steps else None

    def add(self, step: int, value: float | None) -> None:
        """Take a step's value. One that is missing, NaN or infinite is left out."""
        if self._steps and self._steps[-1] >= step:
            self.go_back_to(step)
        if value is None or not abs(value) < LARGEST:
            return
        if len(self._values) == self._window:
            self._steps.popleft()
            self._drop(self._values.popleft())
        self._steps.append(step)
        self._values.append(value)
        insort(self._sorted, value)

    def go_back_to(self, step: int) -> None:
        """Forget the values from `step` on, which the run makes again."""
        while self._steps and self._steps[-1] >= step:
            self._steps.pop()
            self._drop(self._values.pop())

    def clear(self) -> None:
        """Forget all values."""
        for known in (self._steps, self._values, self._sorted):
            known.clear()

    def _drop(self, value: float) -> None:
        del self._sorted[bisect_left(self._sorted, value)]

    # ------------------------------------------------------------ statistics

    @property
    def mean(self) -> float | None:
        return math.fsum(self._values) / len(self._values) if self._values else None

    @property
    def std(self) -> float | None:
        """The sample standard deviation (divisor n - 1), from two values on."""
        mean, count = self.mean, len(self._values)
        return None if mean is None or count < 2 else math.dist(self._values, [mean] * count) / math.sqrt(count - 1)

    @property
    def median(self) -> float | None:
        if not self._sorted:
            return None
        half = len(self._sorted) // 2
        return self._sorted[half] if len(self._sorted) % 2 else (self._sorted[half - 1] + self._sorted[half]) / 2

    @property
    def mad(self) -> float | None:
        """The median absolute deviation from the median, not scaled."""
        middle = self.median
        return None if middle is None else median([abs(value - middle) for value in self._sorted])

    @property
    def scatter(self) -> float | None:
        """The MAD, scaled to the standard deviation of normal scatter."""
        mad = self.mad
        return None if mad is None else MAD_SCALE * mad

    def robust_z(self, value: float) -> float | None:
        """Return how far a value is above the median, in units of the scatter. None if more than half of the values are
        equal, because the scatter is then 0."""
        middle, scatter = self.median, self.scatter
        return None if middle is None or not scatter else (value - middle) / scatter

    @property
    def trend(self) -> float | None:
        """The slope of the least-squares line, per step; from two values on."""
        if len(self._values) < 2:
            return None
        steps, spread = self._centred_steps()
        return math.fsum(map(mul, steps, self._values)) / spread  # the steps' sum is 0: any mean drops out

    def _centred_steps(self) -> tuple[tuple[float, ...], float]:
        """The steps minus their mean, and the sum of their squares: the same for every full window without gaps."""
        count = len(self._steps)
        has_gaps = self._steps[-1] - self._steps[0] != count - 1
        if not has_gaps and len(self._centred) == count:
            return self._centred, self._spread
        first, middle = self._steps[0], math.fsum(self._steps) / count
        centred = tuple((step - first) - (middle - first) for step in self._steps)
        spread = math.fsum(map(mul, centred, centred))
        if not has_gaps:
            self._centred, self._spread = centred, spread
        return centred, spread
