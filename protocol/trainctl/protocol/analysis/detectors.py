"""Detectors of a loss's faults: spikes, divergence and plateaus.

A spike: the loss jumps far above its trend, with the gradient norm or alone, and may or may not come back. A
divergence: it has kept rising far above its best level. A plateau: evaluations no longer improve.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from trainctl.protocol.analysis.rolling import MAD_SCALE, WINDOW_STEPS, RollingStatistics, is_usable
from trainctl.protocol.config.policies import (
    BACK_STEPS,
    DIVERGED_MADS,
    PAST_STEPS,
    SPIKE_MADS,
    SPIKE_PERCENT,
    SPIKE_STEPS,
    TREND_STEPS,
)

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


DIVERGED_PERCENT: Final = 5.0
"""Least distance above the best level in percent of it, for curves that hardly scatter."""
LEVEL_STEPS: Final = 50
"""Steps whose median is the level of the loss: one low loss is no best level."""


@dataclass(frozen=True)
class Best:
    """The lowest level of a run."""

    step: int
    level: float  # median of the LEVEL_STEPS losses that end with the step
    scatter: float  # of those losses, as a standard deviation


@dataclass(frozen=True)
class Divergence:
    """The state of a loss that diverges, at the newest step."""

    level: float
    best: Best
    trend: float  # least-squares slope over the last TREND_STEPS steps, per step
    steps: int  # steps in a row that the level has been far above the best


class DivergenceDetector:
    """Takes committed steps in order and says whether the loss diverges.

    It does if its level has been above `best + mads * scatter` for `past` steps in a row, and the trend over the last
    `window` steps rises by more than one scatter. It no longer does when either ends.
    """

    def __init__(
        self,
        mads: float = DIVERGED_MADS,
        window: int = TREND_STEPS,
        past: int = PAST_STEPS,
        percent: float = DIVERGED_PERCENT,
    ) -> None:
        self._mads, self._part, self._past = mads, percent / 100, past
        self._window, self._recent = RollingStatistics(window), RollingStatistics(LEVEL_STEPS)
        self._best: Best | None = None
        self._steps = 0
        self._divergence: Divergence | None = None

    @property
    def best(self) -> Best | None:
        """The lowest level so far; None before LEVEL_STEPS steps."""
        return self._best

    @property
    def divergence(self) -> Divergence | None:
        """The present divergence, None if there is none."""
        return self._divergence

    @property
    def steps(self) -> int:
        """Steps in a row that the level has been far above the best."""
        return self._steps

    @property
    def above(self) -> float | None:
        """Return how far the level is above the best, in units of the scatter that counts; None before LEVEL_STEPS
        steps."""
        level, best = self._recent.median, self._best
        if level is None or best is None or not (distance := self._distance(best)):
            return None
        return self._mads * (level - best.level) / distance

    @property
    def rise(self) -> float | None:
        """The rise of the loss over the window, in units of the scatter at the best; None before the window is full."""
        trend, best = self._window.trend, self._best
        if trend is None or best is None or not self._window.is_full or not best.scatter:
            return None
        return trend * len(self._window) / best.scatter

    def add(self, step: int, loss: float | None) -> Divergence | None:
        """Take a committed step. One that was made again takes the place of itself and of all steps after it."""
        self._go_back_to(step)
        self._window.add(step, loss)
        self._recent.add(step, loss)
        level = self._recent.median
        if level is None or not self._recent.is_full:
            return None
        if self._best is None or level < self._best.level:
            self._best = Best(step, level, self._recent.scatter or 0.0)
        best = self._best
        self._steps = self._steps + 1 if level - best.level > self._distance(best) else 0
        is_long = self._steps >= self._past and self._window.is_full
        self._divergence = self._risen(level, best) if is_long else None
        return self._divergence

    def _distance(self, best: Best) -> float:
        """Least distance above the best that counts, in the loss's unit."""
        return max(self._mads * best.scatter, self._part * abs(best.level))

    def _risen(self, level: float, best: Best) -> Divergence | None:
        trend = self._window.trend
        rises = trend is not None and trend * len(self._window) > best.scatter and trend > 0
        return Divergence(level, best, trend, self._steps) if trend is not None and rises else None

    def _go_back_to(self, step: int) -> None:
        last = self._window.last_step
        if last is None or last < step:
            return
        self._steps, self._divergence = max(0, self._steps - (last - step + 1)), None
        if self._best is not None and self._best.step >= step:
            self._best = None
        self._window.go_back_to(step)
        self._recent.go_back_to(step)


MIN_IMPROVEMENT: Final = 1e-4
"""Least improvement that counts, relative to the best loss."""
PATIENCE: Final = 5
"""Evaluations in a row without improvement that make a plateau."""


class Plateau(NamedTuple):
    """The plateau that evaluations have shown so far."""

    best: float
    best_step: int
    evaluations: int  # in a row since the best, without improvement
    last_step: int  # of the newest evaluation


class PlateauDetector:
    """Takes evaluations in order. Its `state` is small and can be kept: `restore` continues from it."""

    def __init__(self, min_improvement: float = MIN_IMPROVEMENT, patience: int = PATIENCE) -> None:
        """`min_improvement` is relative, `patience` a number of evaluations."""
        self._min_improvement, self._patience = min_improvement, patience
        self._state: Plateau | None = None

    @property
    def state(self) -> Plateau | None:
        """Return the plateau so far; None before the first evaluation."""
        return self._state

    def restore(self, state: Plateau | None) -> None:
        """Continue from a state."""
        self._state = state

    def replay(self, evaluations: Iterable[tuple[int, float]]) -> None:
        """Take the record's evaluations, oldest first: pairs (step, loss)."""
        for step, loss in evaluations:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> Plateau | None:
        """Take an evaluation's loss. Gives what is known if `patience` evaluations in a row have not improved. A loss
        that isn't finite is no improvement. A step that is evaluated again is not counted again."""
        known, usable = self._state, is_usable(loss)
        if usable and (known is None or known.best - loss > self._min_improvement * abs(known.best)):
            self._state = Plateau(loss, step, 0, step)
        elif known is not None and step > known.last_step:
            self._state = known._replace(evaluations=known.evaluations + 1, last_step=step)
        return self._state if self.is_reached else None

    @property
    def is_reached(self) -> bool:
        """Return whether the loss is on a plateau."""
        return self._state is not None and self._state.evaluations >= self._patience
