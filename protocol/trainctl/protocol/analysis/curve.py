"""The judge of a run's curve: what its committed steps show, for alerts, policies and diagnosis alike.

Each fault has one detector and one set of limits. What follows from it is decided elsewhere: an alert is raised unless
its kind is off, a policy advises or acts as its mode says, and a diagnosis shows it in any case.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from trainctl.protocol.analysis.detectors import Divergence, DivergenceDetector, Spike, SpikeDetector
from trainctl.protocol.analysis.rolling import RollingStatistics
from trainctl.protocol.config.alert_rules import AlertsTable
from trainctl.protocol.config.policies import CLIP_STEPS, PolicyTables
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import StepCommitted

RECENT_STEPS: Final = 100
"""Newest steps among which those that trained nothing are counted."""
Wasted = Literal["not-finite", "overflow"]
"""Why a step trained nothing: a loss or gradient that isn't finite, or one that overflowed, as is usual in float16."""


@dataclass(frozen=True)
class CurveLimits:
    """Limits of the detectors. Where both tables of a run file can set one, the policy's own value counts for all."""

    alerts: AlertsTable = field(default_factory=AlertsTable)
    policies: PolicyTables = field(default_factory=PolicyTables)
    may_overflow: bool = True
    """True if gradients are computed in float16, or in a type that isn't known."""

    @classmethod
    def of(cls, config: RunFile | None) -> CurveLimits:
        """Return a run file's limits, or the usual ones."""
        return cls() if config is None else cls(config.alerts, config.policy, config.model.computed == "float16")

    @property
    def spike_steps(self) -> int:
        """Steps in a row above the trend that make a spike."""
        return self.policies.spike.steps or self.alerts.loss_spike_steps

    @property
    def spike_mads(self) -> float:
        """Distance above the trend that makes a spike, in scatters."""
        return self.policies.spike.mads or self.alerts.loss_spike_mads

    @property
    def diverged_mads(self) -> float:
        """Distance above the best level that makes a divergence, in scatters."""
        return self.policies.divergence.mads or self.alerts.diverged_mads

    def spikes(self) -> SpikeDetector:
        """Return a new detector of spikes."""
        back_steps, percent = self.policies.spike.recover_steps, self.alerts.loss_spike_percent
        return SpikeDetector(self.spike_mads, self.spike_steps, back_steps, percent)

    def divergences(self) -> DivergenceDetector:
        """Return a new detector of divergence."""
        table = self.policies.divergence
        return DivergenceDetector(self.diverged_mads, table.steps, table.past_steps)


class CurveJudge:
    """Takes committed steps in order; one that was made again takes the place of itself and of all steps after it."""

    def __init__(self, limits: CurveLimits | None = None) -> None:
        self.limits = limits or CurveLimits()
        self.spikes, self.divergences = self.limits.spikes(), self.limits.divergences()
        self._wasted: deque[tuple[int, Wasted | None]] = deque(maxlen=RECENT_STEPS)  # by step
        self._clips = RollingStatistics(CLIP_STEPS)

    def replay(self, steps: Iterable[StepCommitted]) -> None:
        """Take steps of the record, oldest first."""
        for step in steps:
            self.add_step(step)

    def add_step(self, step: StepCommitted) -> None:
        """Take a committed step."""
        self.add(step.step, step.loss, step.grad_norm, step.skipped, step.values.get("clip_scale"))

    def add(
        self,
        step: int,
        loss: float | None,
        grad_norm: float | None,
        skipped: str | None = None,
        clip_scale: float | None = None,
    ) -> None:
        """Take a step's loss, its gradient norm, why it was skipped, and the factor that clipping had: None where
        these aren't known."""
        while self._wasted and self._wasted[-1][0] >= step:
            self._wasted.pop()
        self._wasted.append((step, self._why_wasted(loss, grad_norm, skipped)))
        self._clips.add(step, clip_scale if skipped is None else None)
        self.divergences.add(step, loss)
        self.spikes.add(step, loss, grad_norm)

    def _why_wasted(self, loss: float | None, grad_norm: float | None, skipped: str | None) -> Wasted | None:
        if skipped == "overflow":
            return "overflow" if self.limits.may_overflow else "not-finite"
        if skipped == "empty":
            return None
        is_finite = skipped is None and all(value is None or math.isfinite(value) for value in (loss, grad_norm))
        return None if is_finite else "not-finite"

    # ------------------------------------------------------------ findings

    @property
    def spike(self) -> Spike | None:
        """The present spike of the loss; None if there is none."""
        return self.spikes.spike

    @property
    def divergence(self) -> Divergence | None:
        """The present divergence of the loss; None if there is none."""
        return self.divergences.divergence

    @property
    def is_finite(self) -> bool:
        """Return whether the newest step's loss and gradient were finite, but for a usual overflow."""
        return not self._wasted or self._wasted[-1][1] != "not-finite"

    def wasted(self, why: Wasted) -> list[int]:
        """Return the steps among the newest RECENT_STEPS that trained nothing for this reason, oldest first."""
        return [step for step, found in self._wasted if found == why]

    def are_many_wasted(self, why: Wasted) -> bool:
        """Return whether so many of these steps trained nothing that it is a fault."""
        return len(self.wasted(why)) >= self.limits.alerts.skipped_steps

    @property
    def recent_steps(self) -> int:
        """The number of newest steps that are counted, at most RECENT_STEPS."""
        return len(self._wasted)

    @property
    def clip_scale(self) -> float | None:
        """The median factor of clipping over CLIP_STEPS steps; None before so many are known."""
        return self._clips.median if self._clips.is_full else None

    @property
    def is_clip_bound(self) -> bool:
        """Return whether clipping leaves almost nothing of the gradients."""
        return self.clip_scale is not None and self.clip_scale < self.limits.alerts.clip_scale
