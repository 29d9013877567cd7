"""How far the mean seconds of a run's steps drift, measured between parts of the run. Pure."""

import math
import statistics
from itertools import pairwise
from typing import Final

DRIFT: Final = 0.03
"""Drift of the speed over a whole run, relative, that is assumed until more is known."""
_DRIFT_WEIGHT: Final = 6.0
"""Measured differences that the assumed drift counts as much as."""
_MOST_DRIFT: Final = 0.2
"""Relative drift over a whole run that is never exceeded: a few steps would extrapolate too far."""
_BLOCKS: Final = 64
"""Most means of blocks that are kept; when there are more, each two become one."""
_BLOCK_STEPS: Final = 16
"""Steps of a block at first."""


class DriftMeter:
    """How far the mean seconds of a step wander in a run."""

    def __init__(self) -> None:
        self._means: list[float] = []
        self._block: list[float] = []
        self._size = _BLOCK_STEPS

    def add(self, seconds: float) -> None:
        """An ordinary step."""
        self._block.append(seconds)
        if len(self._block) < self._size:
            return
        self._means.append(statistics.fmean(self._block))
        self._block.clear()
        if len(self._means) == _BLOCKS:
            self._means = [(one + other) / 2 for one, other in zip(self._means[::2], self._means[1::2], strict=True)]
            self._size *= 2

    def of_run(self, steps: int, scatter: float) -> float:
        """The drift over a run of so many steps, relative; `scatter`: of a single step, relative. What is measured
        between quarters of the steps so far counts beside what is assumed."""
        quarter = len(self._means) // 4
        if not quarter:
            return DRIFT
        parts = [statistics.fmean(self._means[at * quarter : (at + 1) * quarter]) for at in range(4)]
        changes = [math.log(after / before) for before, after in pairwise(parts)]
        length = quarter * self._size
        found = statistics.fmean(change**2 for change in changes) - 2 * scatter**2 / length
        # Means of two neighbouring parts of a random walk differ by 2/3 of its variance over one of them.
        measured = max(found, 0.0) / (2 * length / 3) * max(steps, 1)
        weighed = (_DRIFT_WEIGHT * DRIFT**2 + len(changes) * measured) / (_DRIFT_WEIGHT + len(changes))
        return min(math.sqrt(weighed), _MOST_DRIFT)
