"""Finds plateaus: the loss on the held-out samples has stopped improving."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from trainctl.protocol.analysis.rolling import is_usable

MIN_IMPROVEMENT: Final = 1e-4
"""Least improvement that counts, relative to the best loss."""
PATIENCE: Final = 5
"""Evaluations in a row without improvement that make a plateau."""


class Plateau(NamedTuple):
    """What evaluations have shown."""

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
        """What is known so far; None before the first evaluation."""
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
        """Whether the loss is on a plateau."""
        return self._state is not None and self._state.evaluations >= self._patience
