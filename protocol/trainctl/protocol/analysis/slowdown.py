"""Slowdowns: a duration that was steady has become longer, and stays so.

It is a one-sided CUSUM (Page 1954) of logarithms against a learned level. Each step's share of it is bounded, so that a
few long steps, as in a checkpoint, are no slowdown (Winsorising: Huber 1981).
"""

import math
from collections import deque
from collections.abc import Iterable
from statistics import median
from typing import Final

import msgspec

from trainctl.protocol.analysis.rolling import MAD_SCALE, WINDOW_STEPS, RollingStatistics, is_usable
from trainctl.protocol.messages import StepCommitted

LEARNED_STEPS: Final = 60
"""Steps from which the level and its scatter are learned."""
RECENT_STEPS: Final = 20
"""Newest steps whose median is compared with the level."""
SOUGHT: Final = 0.1
"""Slowdown that is to be found: 0.1 is 10 % longer. Half of it is allowed for at each step."""
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
        is_long = may_be_slow and (self.slowdown or 0.0) >= SOUGHT / 2
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
