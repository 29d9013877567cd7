"""Statistics over a window of a run's newest steps, and slowdowns: a duration that was steady has become longer.

A slowdown is a one-sided CUSUM (Page 1954) of logarithms against a learned level. Each step's share of it is bounded,
so that a few long steps, as in a checkpoint, are no slowdown (Winsorising: Huber 1981).
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from operator import mul
from statistics import median
from typing import Final

import msgspec

from trainctl.protocol.messages import StepCommitted

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


LEARNED_STEPS: Final = 60
"""Steps from which the level and its scatter are learned."""
RECENT_STEPS: Final = 20
"""Newest steps whose median is compared with the level."""
SOUGHT: Final = 0.1
"""Slowdown that is to be found, by alerts and by a diagnosis: 0.1 is 10 % longer. Half of it is allowed for at each
step."""
LONGER: Final = SOUGHT / 2
"""Slowdown below which there is none, and no reading of a machine counts as the cause of one."""
ALLOWED_SCATTERS: Final = 1.5
"""Least that is allowed for at each step, in units of the scatter: more noise needs a larger slowdown."""
MOST_SCATTERS: Final = 3.0
"""Most that one step adds, in units of the scatter."""
ALARM_SCATTERS: Final = 15.0
"""Sum at which it is a slowdown, in units of the scatter: at least 5 steps of MOST_SCATTERS."""
LEAST_SCATTER: Final = 0.005
"""Least scatter that is assumed, as a part of the level."""


class SlowdownDetector:
    """Takes durations (seconds, or seconds per sample) in order. A level that gets shorter for good is learned again.

    It is a slowdown if the sum reaches ALARM_SCATTERS and the median of the newest RECENT_STEPS is at least half of
    SOUGHT above the level. It is over when that median no longer is.
    """

    def __init__(self, level: float | None = None) -> None:
        """`level`: what durations are compared with from the beginning, if it is known from before a restart."""
        self._level = math.log(level) if level is not None else None
        self._scatter: float | None = None
        self._learned: list[float] = []
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._longer, self._shorter = 0.0, 0.0
        self._is_slow = False

    @property
    def level(self) -> float | None:
        """The duration before a slowdown; None before LEARNED_STEPS steps."""
        return math.exp(self._level) if self._level is not None else None

    @property
    def is_slow(self) -> bool:
        return self._is_slow

    @property
    def slowdown(self) -> float | None:
        """Return by what part the newest steps are longer than the level, by their median: 0.1 is 10 % longer. None
        before the level or RECENT_STEPS steps are known."""
        if self._level is None or len(self._recent) < RECENT_STEPS:
            return None
        return math.exp(median(self._recent) - self._level) - 1

    def add(self, duration: float | None) -> bool:
        """Take a step's duration; one that isn't a number above 0 is left out. Gives whether it is a slowdown now."""
        if duration is None or not is_usable(duration) or duration <= 0:
            return self._is_slow
        value = math.log(duration)
        self._recent.append(value)
        if self._level is None or self._scatter is None:
            self._learn(value)
        else:
            self._compare(value, self._level, self._scatter)
        return self._is_slow

    def _learn(self, value: float) -> None:
        """The level from LEARNED_STEPS; the scatter about a level that is known from as many as are compared."""
        self._learned.append(value)
        if len(self._learned) < (LEARNED_STEPS if self._level is None else RECENT_STEPS):
            return
        middle = median(self._learned)
        scatter = MAD_SCALE * median([abs(value - middle) for value in self._learned])
        self._level = middle if self._level is None else self._level
        self._scatter = max(scatter, LEAST_SCATTER)
        for one in self._learned if self._level != middle else ():
            self._compare(one, self._level, self._scatter)
        self._learned = []

    def _compare(self, value: float, level: float, scatter: float) -> None:
        allowed = max(math.log1p(SOUGHT) / 2 / scatter, ALLOWED_SCATTERS)
        above = (value - level) / scatter
        self._longer = _bounded(self._longer + min(above - allowed, MOST_SCATTERS))
        self._shorter = _bounded(self._shorter + min(-above - allowed, MOST_SCATTERS))
        may_be_slow = self._is_slow or self._longer >= ALARM_SCATTERS
        is_long = may_be_slow and (self.slowdown or 0.0) >= LONGER
        if self._shorter >= ALARM_SCATTERS:
            self._start_over()
        elif self._is_slow and not is_long:
            self._longer, self._is_slow = 0.0, False
        else:
            self._is_slow = self._is_slow or is_long

    def _start_over(self) -> None:
        """It has become faster: learn the level from here on."""
        self._level, self._scatter, self._is_slow = None, None, False
        self._longer, self._shorter = 0.0, 0.0


def _bounded(total: float) -> float:
    """A sum between nothing and what raises an alarm, so that it ends as soon as it may."""
    return min(max(total, 0.0), ALARM_SCATTERS)


STATISTICS_STEPS: Final = WINDOW_STEPS
"""Steps that the metrics are computed over. They have no value before so many are known."""


class StepStatistics:
    """Takes committed steps in order; one that was made again takes the place of itself and of all after it."""

    def __init__(self, before: Iterable[StepCommitted] = ()) -> None:
        """`before`: the newest STATISTICS_STEPS steps of the record, oldest first."""
        self._loss, self._norm = RollingStatistics(STATISTICS_STEPS), RollingStatistics(STATISTICS_STEPS)
        self._skipped = RollingStatistics(STATISTICS_STEPS)  # 1 or 0
        for step in before:
            self._add(step)

    def joined(self, step: StepCommitted) -> StepCommitted:
        """The step with the metrics among its values. A value that it already has stays."""
        found: dict[str, float | None] = {}
        self._loss.go_back_to(step.step)
        if self._loss.is_full and step.loss is not None:
            found["loss_z"] = self._loss.robust_z(step.loss)  # against the steps before, which it doesn't move
        self._add(step)
        if self._loss.is_full:
            found |= {"loss_std": self._loss.std, "loss_trend": self._loss.trend}
        if self._norm.is_full:
            found["grad_norm_trend"] = self._norm.trend
        if self._skipped.is_full:
            found["recent_skipped_steps"] = sum(self._skipped.values)
        known = {name: value for name, value in found.items() if value is not None}
        return msgspec.structs.replace(step, values={**known, **step.values}) if known else step

    def _add(self, step: StepCommitted) -> None:
        self._loss.add(step.step, step.loss)
        self._norm.add(step.step, step.grad_norm)
        self._skipped.add(step.step, float(step.skipped is not None))
