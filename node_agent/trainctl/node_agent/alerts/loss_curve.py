"""Watches the loss curve: non-finite losses, skipped steps, spikes, divergence, and clipping that freezes learning."""

import math
from collections import deque

from trainctl.node_agent.alerts.findings import Finding, Said, number
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.loss_trends import Divergence, DivergenceDetector
from trainctl.protocol.analysis.rolling import WINDOW_STEPS, RollingStatistics
from trainctl.protocol.analysis.spikes import Spike, SpikeDetector
from trainctl.protocol.config.alert_rules import AlertsTable

CALM_STEPS = 20
"""Steps without a skipped one after which the alert is cleared."""


class LossWatch:
    """Takes committed steps in order; a step made again takes the place of what it supersedes."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._spikes = SpikeDetector(
            table.loss_spike_mads, table.loss_spike_steps, percent=table.loss_spike_percent, window=WINDOW_STEPS
        )
        self._skips: deque[tuple[int, bool]] = deque(maxlen=WINDOW_STEPS)
        self._divergence = DivergenceDetector(table.diverged_mads)
        self._clips = RollingStatistics(WINDOW_STEPS)

    def step(self, step: m.StepCommitted) -> list[Finding]:
        """What is found at a committed step."""
        self._go_back_to(step.step)
        found = [self._nonfinite(step), self._skipped(step), *self._clip(step), self._diverged(step)]
        if step.loss is not None and math.isfinite(step.loss):
            found.append(self._spike(step, step.loss))
        return found

    def _go_back_to(self, step: int) -> None:
        while self._skips and self._skips[-1][0] >= step:
            self._skips.pop()

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
        """By the loss alone: an alert about a spike that the gradient norm doesn't show is still worth a look."""
        found = self._spikes.add(step.step, loss, None)
        return Finding("loss-spike", found is not None, found is None, lambda: _say_spike(found, step))


def _say_spike(found: Spike | None, step: m.StepCommitted) -> Said:
    if found is None:
        return Said("the loss is back at its trend")
    text = f"loss {number(step.loss or 0.0)} at step {step.step:,}, trend {number(found.expected)}"
    scatter = f"scatter over {WINDOW_STEPS} steps before the spike {number(found.scatter)}"
    return Said(text, (scatter, *_facts(step)))


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
