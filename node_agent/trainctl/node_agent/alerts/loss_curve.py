"""Watches the loss curve: non-finite losses, skipped steps, spikes, divergence, and clipping that freezes learning."""

import math
from collections import deque

from trainctl.node_agent.alerts.findings import Finding, Said, number
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.divergence import Divergence, DivergenceDetector
from trainctl.protocol.analysis.robust_trend import LEAST_STEPS, robust_trend
from trainctl.protocol.analysis.rolling import RollingStatistics
from trainctl.protocol.config.alert_rules import AlertsTable

WINDOW_STEPS = 100
"""Steps that a loss is compared with, and in which skipped steps are counted."""
CALM_STEPS = 20
"""Steps without a skipped one after which the alert is cleared."""


class LossWatch:
    """Takes committed steps in order; a step made again takes the place of what it supersedes."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._losses: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)
        self._skips: deque[tuple[int, bool]] = deque(maxlen=WINDOW_STEPS)
        self._divergence = DivergenceDetector(table.diverged_mads)
        self._clips = RollingStatistics(WINDOW_STEPS)

    def step(self, step: m.StepCommitted) -> list[Finding]:
        """What is found at a committed step."""
        self._go_back_to(step.step)
        found = [self._nonfinite(step), self._skipped(step), *self._clip(step), self._diverged(step)]
        if step.loss is not None and math.isfinite(step.loss):
            if len(self._losses) >= LEAST_STEPS:
                found.append(self._spike(step, step.loss))
            self._losses.append((step.step, step.loss))
        return found

    def _go_back_to(self, step: int) -> None:
        for kept in (self._losses, self._skips):
            while kept and kept[-1][0] >= step:
                kept.pop()

    @staticmethod
    def _nonfinite(step: m.StepCommitted) -> Finding:
        values = (("loss", step.loss), ("gradient norm", step.grad_norm))
        found = [f"{name} is {value}" for name, value in values if value is not None and not math.isfinite(value)]
        bad = bool(found) and step.skipped != "overflow"
        what = f"{''.join(found[:1])} at step {step.step:,}" + ("; the step was skipped" if step.skipped else "")
        return Finding("nonfinite", bad, not bad, lambda: Said(what, _facts(step)))

    def _skipped(self, step: m.StepCommitted) -> Finding:
        self._skips.append((step.step, step.skipped == "overflow"))
        flags = [skipped for _, skipped in self._skips]
        count = sum(flags)
        text = f"{count} of the last {len(flags)} steps skipped: gradient overflow"
        good = len(flags) >= CALM_STEPS and not any(flags[-CALM_STEPS:])
        return Finding("skipped", count >= self._table.skipped_steps, good, lambda: Said(text, _facts(step)))

    def _clip(self, step: m.StepCommitted) -> list[Finding]:
        self._clips.add(step.step, step.values.get("clip_scale"))
        scale, least = self._clips.median, self._table.clip_scale
        if scale is None or not self._clips.is_full:
            return []

        def say() -> Said:
            text = f"median clip scale {number(scale)} over {WINDOW_STEPS} steps: updates are almost nothing"
            advice = "raise optimizer.clip_norm to about the usual gradient norm; steps are too small to learn from"
            return Said(text, (advice, *_facts(step)))

        return [Finding("clip", scale < least, scale > 2 * least, say)]

    def _diverged(self, step: m.StepCommitted) -> Finding:
        found = self._divergence.add(step.step, step.loss)
        return Finding("divergence", found is not None, found is None, lambda: _say_diverged(found, step))

    def _spike(self, step: m.StepCommitted, loss: float) -> Finding:
        table = self._table
        found = robust_trend([loss for _, loss in self._losses])
        most = max(table.loss_spike_mads * found.scatter, table.loss_spike_percent / 100 * abs(found.expected))
        above = loss - found.expected

        def say() -> Said:
            text = f"loss {number(loss)} at step {step.step:,}, trend {number(found.expected)}"
            scatter = f"scatter over the last {WINDOW_STEPS} steps {number(found.scatter)}"
            return Said(text, (scatter, *_facts(step)))

        return Finding("loss-spike", above > most, above < most / 2, say)


def _say_diverged(found: Divergence | None, step: m.StepCommitted) -> Said:
    if found is None:
        return Said("the loss no longer rises")
    best = found.best
    text = (
        f"the loss rises: level {number(found.level)}, best {number(best.level)} at step {best.step:,},"
        f" {found.trend:+.2g} per step"
    )
    advice = f"lower the learning rate, or resume from a checkpoint at about step {best.step:,}"
    return Said(text, (advice, f"above the best level for {found.steps:,} steps", *_facts(step)))


def _facts(step: m.StepCommitted) -> tuple[str, ...]:
    """What is known of a step, in two lines."""
    values = (("loss", step.loss), ("gradient norm", step.grad_norm))
    settings = [] if step.learning_rate is None else [f"learning rate {number(step.learning_rate)}"]
    settings += [] if step.global_batch is None else [f"global batch {step.global_batch:,}"]
    made = ", ".join(f"{name} {number(value)}" for name, value in values if value is not None)
    return (*([made] if made else []), ", ".join([*settings, f"plan v{step.plan_version}"]))
