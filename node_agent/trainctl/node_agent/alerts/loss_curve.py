"""Watches the curve: losses that are no numbers, skipped steps, and losses far above their trend."""

import math
from collections import deque
from typing import NamedTuple

from trainctl.node_agent.alerts.findings import Finding, Said, median, number
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

WINDOW_STEPS = 100
"""Steps that a loss is compared with, and that skipped ones are counted in."""
LEAST_STEPS = 30
"""Before so many, no trend is known."""
CALM_STEPS = 20
"""Without a skipped step among so many, nothing is wrong any more."""
MAD_SCALE = 1.4826
"""Times the median absolute deviation is the standard deviation, of normal scatter."""


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
        if math.isfinite(step.loss):
            if len(self._losses) >= LEAST_STEPS:
                found.append(self._spike(step))
            self._losses.append((step.step, step.loss))
        return found

    def _go_back_to(self, step: int) -> None:
        for kept in (self._losses, self._skips):
            while kept and kept[-1][0] >= step:
                kept.pop()

    @staticmethod
    def _nonfinite(step: m.StepCommitted) -> Finding:
        bad = not (math.isfinite(step.loss) and math.isfinite(step.grad_norm)) and step.skipped != "overflow"
        what = f"loss is {step.loss}" if not math.isfinite(step.loss) else f"gradient norm is {step.grad_norm}"
        what += f" at step {step.step:,}" + ("; the step is skipped" if step.skipped else "")
        return Finding("nonfinite", bad, not bad, lambda: Said(what, _facts(step)))

    def _skipped(self, step: m.StepCommitted) -> Finding:
        self._skips.append((step.step, step.skipped == "overflow"))
        flags = [skipped for _, skipped in self._skips]
        count = sum(flags)
        text = f"{count} of the last {len(flags)} steps skipped: overflow of the gradients"
        good = len(flags) >= CALM_STEPS and not any(flags[-CALM_STEPS:])
        return Finding("skipped", count >= self._table.skipped_steps, good, lambda: Said(text, _facts(step)))

    def _spike(self, step: m.StepCommitted) -> Finding:
        table = self._table
        found = trend([loss for _, loss in self._losses])
        most = max(table.loss_spike_mads * found.scatter, table.loss_spike_percent / 100 * abs(found.expected))
        above = step.loss - found.expected

        def say() -> Said:
            text = f"loss {number(step.loss)} at step {step.step:,}, {number(found.expected)} by its trend"
            scatter = f"scatter of the last {WINDOW_STEPS} steps {number(found.scatter)}"
            return Said(text, (scatter, *_facts(step)))

        return Finding("loss-spike", above > most, above < most / 2, say)


def _facts(step: m.StepCommitted) -> tuple[str, ...]:
    return (
        f"loss {number(step.loss)}, gradient norm {number(step.grad_norm)}",
        f"learning rate {number(step.learning_rate)}, global batch {step.global_batch:,}, plan v{step.plan_version}",
    )
