"""Health metrics of steps: the loss's deviation, trend and robust z, the gradient norm's trend, and skipped steps."""

from collections.abc import Iterable
from typing import Final

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.rolling import WINDOW_STEPS, RollingStatistics

STATISTICS_STEPS: Final = WINDOW_STEPS
"""Steps that the metrics are computed over. They have no value before so many are known."""


class StepStatistics:
    """Takes committed steps in order; one that was made again takes the place of itself and of all after it."""

    def __init__(self, before: Iterable[m.StepCommitted] = ()) -> None:
        """`before`: the newest STATISTICS_STEPS steps of the record, oldest first."""
        self._loss, self._norm = RollingStatistics(STATISTICS_STEPS), RollingStatistics(STATISTICS_STEPS)
        self._skipped = RollingStatistics(STATISTICS_STEPS)  # 1 or 0
        for step in before:
            self._add(step)

    def joined(self, step: m.StepCommitted) -> m.StepCommitted:
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

    def _add(self, step: m.StepCommitted) -> None:
        self._loss.add(step.step, step.loss)
        self._norm.add(step.step, step.grad_norm)
        self._skipped.add(step.step, float(step.skipped is not None))
