"""Watches the loss curve: non-finite losses, skipped steps, and losses far above their trend."""

import math
from collections import deque
from typing import NamedTuple

from trainctl.node_agent.alerts.findings import Finding, Said, median, number
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

WINDOW_STEPS = 100
"""Steps that a loss is compared with, and in which skipped steps are counted."""
LEAST_STEPS = 30
"""Steps needed before a trend is known."""
CALM_STEPS = 20
"""Steps without a skipped one after which the alert is cleared."""
MAD_SCALE = 1.4826
"""Factor from the median absolute deviation to the standard deviation of normal scatter."""


class Trend(NamedTuple):
    """What the next loss should be about, and by how much losses scatter (as a standard deviation)."""

    expected: float
    scatter: float


def trend(losses: list[float]) -> Trend:
    """By the medians of the two halves, which a few spikes don't move. A falling loss may level off, so no less is
    expected than the later half's median."""
    count, half = len(losses), len(losses) // 2
    early, late = median(losses[:half]), median(losses[half:])
    slope = (late - early) / (count / 2)
    above = [loss - late - slope * (index - 0.75 * count) for index, loss in enumerate(losses)]
    middle = median(above)
    scatter = MAD_SCALE * median(abs(value - middle) for value in above)
    return Trend(max(late + 0.25 * slope * count, late), scatter)


class LossWatch:
    """Takes committed steps in order; a step made again takes the place of what it supersedes."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._losses: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)
        self._skips: deque[tuple[int, bool]] = deque(maxlen=WINDOW_STEPS)

    def step(self, step: m.StepCommitted) -> list[Finding]:
        """What is found at a committed step."""
        self._go_back_to(step.step)
        found = [self._nonfinite(step), self._skipped(step)]
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

    def _spike(self, step: m.StepCommitted, loss: float) -> Finding:
        table = self._table
        found = trend([loss for _, loss in self._losses])
        most = max(table.loss_spike_mads * found.scatter, table.loss_spike_percent / 100 * abs(found.expected))
        above = loss - found.expected

        def say() -> Said:
            text = f"loss {number(loss)} at step {step.step:,}, trend {number(found.expected)}"
            scatter = f"scatter over the last {WINDOW_STEPS} steps {number(found.scatter)}"
            return Said(text, (scatter, *_facts(step)))

        return Finding("loss-spike", above > most, above < most / 2, say)


def _facts(step: m.StepCommitted) -> tuple[str, ...]:
    """What is known of a step, in two lines."""
    values = (("loss", step.loss), ("gradient norm", step.grad_norm))
    settings = [] if step.learning_rate is None else [f"learning rate {number(step.learning_rate)}"]
    settings += [] if step.global_batch is None else [f"global batch {step.global_batch:,}"]
    made = ", ".join(f"{name} {number(value)}" for name, value in values if value is not None)
    return (*([made] if made else []), ", ".join([*settings, f"plan v{step.plan_version}"]))
