"""Finds spikes: the loss jumps far above its trend, with the gradient norm or alone, and may or may not come back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from trainctl.protocol.analysis.rolling import MAD_SCALE, WINDOW_STEPS, RollingStatistics, is_usable
from trainctl.protocol.config.policies import BACK_STEPS, SPIKE_MADS, SPIKE_PERCENT, SPIKE_STEPS
from trainctl.protocol.messages import StepCommitted

LEAST_STEPS: Final = 30
"""Steps needed before a trend is known."""


@dataclass(frozen=True)
class RobustTrend:
    """The value that a curve should have next, and the scatter of its values (as a standard deviation)."""

    expected: float
    scatter: float
    slope: float  # per value


def robust_trend(values: Sequence[float]) -> RobustTrend:
    """Return the trend by the medians of the two halves of at least 2 values, oldest first. A falling loss may level
    off, so no less is expected than the later half's median."""
    count, half = len(values), len(values) // 2
    early, late = median(values[:half]), median(values[half:])
    slope = (late - early) / (count / 2)
    start = late - 0.75 * slope * count
    above = [value - start - slope * index for index, value in enumerate(values)]
    middle = median(above)
    scatter = MAD_SCALE * median([abs(value - middle) for value in above])
    return RobustTrend(max(late + 0.25 * slope * count, late), scatter, slope)


_REFRESH_STEPS: Final = 10
"""Steps between two computations of the trend, so that a step costs little."""


@dataclass(frozen=True)
class Spike:
    """A spike as it is at the newest step."""

    first: int  # its first step
    steps: int  # from its first step to the newest, both included
    loss: float  # highest so far
    expected: float  # loss that the trend before it led to
    scatter: float  # of the loss before it, as a standard deviation
    is_stuck: bool  # whether it did not come back in time
    norm_rose: bool  # whether the gradient norm was far above its trend too, for as many steps in a row, or isn't known


class SpikeDetector:
    """Takes committed steps in order and gives the present spike.

    A spike is `steps` steps in a row whose loss is more than `mads` scatters above its trend. It is over when as many
    losses in a row are less than half as far above. If that has not happened within `back_steps` steps, it is stuck;
    then the detector learns the new level from LEAST_STEPS steps. Steps of a spike never enter the trend that it is
    compared with.
    """

    def __init__(
        self,
        mads: float = SPIKE_MADS,
        steps: int = SPIKE_STEPS,
        back_steps: int = BACK_STEPS,
        percent: float = SPIKE_PERCENT,
    ) -> None:
        self._steps, self._back_steps = steps, back_steps
        self._loss, self._norm = _Level(mads, percent), _Level(mads, percent)
        self._away: list[tuple[int, float, float | None]] = []  # steps above the trend, since the first of them
        self._back = 0  # losses in a row that are back
        self._norms_above, self._norm_rose = 0, False  # in a row, among the steps above the trend
        self._spike: Spike | None = None
        self._newest = -1  # step

    @property
    def spike(self) -> Spike | None:
        """The present spike, None if there is none."""
        return self._spike

    def above(self, loss: float | None, grad_norm: float | None) -> tuple[float | None, float | None]:
        """Return how far a step's loss and gradient norm are above their trends, in units of the scatter that counts;
        None before a trend is known."""
        return self._loss.scatters_above(loss), self._norm.scatters_above(grad_norm)

    def replay(self, steps: Iterable[StepCommitted]) -> None:
        """Take steps of the record, oldest first: the newest 2 WINDOW_STEPS restore what a restart lost."""
        for step in steps:
            self.add(step.step, step.loss, step.grad_norm)

    def add(self, step: int, loss: float | None, grad_norm: float | None) -> Spike | None:
        """Take a committed step. One that was made again takes the place of itself and of all steps after it."""
        if step <= self._newest:
            self._go_back_to(step)
        self._newest = step
        if loss is None or not is_usable(loss):
            return self._spike
        if self._spike is None and not self._loss.is_above(loss):
            self._forget_away()
            self._learn(step, loss, grad_norm)
        else:
            self._away.append((step, loss, grad_norm))
            self._norms_above = self._norms_above + 1 if grad_norm is None or self._norm.is_above(grad_norm) else 0
            self._norm_rose = self._norm_rose or self._norms_above >= self._steps
            self._follow(loss)
        return self._spike

    def _follow(self, loss: float) -> None:
        """A step above the trend, or of a spike."""
        self._back = self._back + 1 if self._loss.is_back(loss) else 0
        first, steps = self._away[0][0], self._away[-1][0] - self._away[0][0] + 1
        if self._spike is None and len(self._away) < self._steps:
            return
        if self._spike is not None and not self._spike.is_stuck and self._back >= self._steps:
            self._end(self._away[-self._steps :])
        elif self._spike is not None and self._spike.is_stuck and steps >= self._back_steps + LEAST_STEPS:
            self._loss.clear()
            self._norm.clear()
            self._end(self._away[-LEAST_STEPS:])
        else:
            highest, before = max(away[1] for away in self._away), self._loss.trend
            is_stuck = steps > self._back_steps
            self._spike = Spike(first, steps, highest, before.expected, before.scatter, is_stuck, self._norm_rose)

    def _end(self, learned: list[tuple[int, float, float | None]]) -> None:
        self._spike, self._back = None, 0
        self._forget_away()
        for away in learned:
            self._learn(*away)

    def _forget_away(self) -> None:
        self._away = []
        self._norms_above, self._norm_rose = 0, False

    def _learn(self, step: int, loss: float, grad_norm: float | None) -> None:
        self._loss.add(step, loss)
        self._norm.add(step, grad_norm)

    def _go_back_to(self, step: int) -> None:
        while self._away and self._away[-1][0] >= step:
            self._away.pop()
            self._back = self._norms_above = 0
        if len(self._away) < self._steps:
            self._spike, self._norm_rose = None, False
        for level in (self._loss, self._norm):
            level.go_back_to(step)


class _Level:
    """One curve's trend, from a window of its steps outside spikes."""

    def __init__(self, mads: float, percent: float) -> None:
        self._mads, self._part = mads, percent / 100
        self._window = RollingStatistics(WINDOW_STEPS)
        self._trend: RobustTrend | None = None
        self._distance = 0.0  # from the trend, beyond which a value is far above it
        self._age = 0  # values since the trend was computed

    @property
    def trend(self) -> RobustTrend:
        assert self._trend is not None, "a spike is above a trend"
        return self._trend

    def is_above(self, value: float) -> bool:
        """Return whether a value is far above the trend. One that isn't finite is, once a trend is known."""
        return self._trend is not None and not value - self._trend.expected <= self._distance

    def is_back(self, value: float) -> bool:
        return value - self.trend.expected < self._distance / 2

    def scatters_above(self, value: float | None) -> float | None:
        known = self._trend is not None and value is not None and self._distance > 0
        return self._mads * (value - self.trend.expected) / self._distance if known and value is not None else None

    def add(self, step: int, value: float | None) -> None:
        self._window.add(step, value)
        self._age += 1
        if len(self._window) >= LEAST_STEPS and (self._trend is None or self._age >= _REFRESH_STEPS):
            self._trend, self._age = robust_trend(self._window.values), 0
            self._distance = max(self._mads * self._trend.scatter, self._part * abs(self._trend.expected))

    def go_back_to(self, step: int) -> None:
        self._window.go_back_to(step)

    def clear(self) -> None:
        self._window.clear()
        self._trend, self._age = None, 0
