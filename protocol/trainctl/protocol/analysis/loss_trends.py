"""Divergence and plateaus of a loss: it has kept rising far above its best level, or no longer falls."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from trainctl.protocol.analysis.rolling import RollingStatistics, is_usable
from trainctl.protocol.config.policies import DIVERGED_MADS, PAST_STEPS, TREND_STEPS
from trainctl.protocol.messages import StepCommitted

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
        self, mads: float = DIVERGED_MADS, window: int = TREND_STEPS, past: int = PAST_STEPS,
        percent: float = DIVERGED_PERCENT, best: Best | None = None,
    ) -> None:  # fmt: skip
        """`best`: the lowest level before, of a run that continues."""
        self._mads, self._part, self._past = mads, percent / 100, past
        self._window, self._recent = RollingStatistics(window), RollingStatistics(LEVEL_STEPS)
        self._best, self._steps = best, 0
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

    def replay(self, steps: Iterable[StepCommitted]) -> None:
        """Take steps of the record, oldest first: the newest TREND_STEPS + LEVEL_STEPS, with `best` from before,
        restore what a restart lost."""
        for step in steps:
            self.add(step.step, step.loss)

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
