"""Watches the loss curve and each rank's own loss.

The curve: non-finite losses, skipped steps, spikes, divergence, and clipping that freezes learning.

Ranks: one whose loss stays apart from the others' reads other data, or computes wrongly. All ranks draw their samples
from one permutation, so their losses differ by chance alone, more so the fewer samples a rank has. What is judged is a
rank's difference from the median of the ranks at the same step, which no single one of them moves: its mean over
OWN_LOSS_STEPS steps against its own scatter from step to step. The default of 1.5 is more than ten standard errors of
that mean: with normal scatter, chance passes it in less than one of 10^9 windows. (A median over the steps would tell
more of few outliers, but of losses with few values it is chance itself.)
"""

import dataclasses
import math
from functools import partial
from statistics import median

from trainctl.node_agent.alerts.conditions import Observation, Said, number
from trainctl.protocol.analysis.curve import CurveJudge
from trainctl.protocol.analysis.detectors import Divergence, Spike
from trainctl.protocol.analysis.rolling import WINDOW_STEPS, RollingStatistics
from trainctl.protocol.config.alert_rules import AlertsTable
from trainctl.protocol.config.policies import CLIP_STEPS
from trainctl.protocol.messages import RankStep, StepCommitted

CALM_STEPS = 20
"""Steps without a skipped one after which the alert is cleared."""
OWN_LOSS_STEPS = 50
"""Steps by which a rank is judged."""
_STEPS_BACK = 8
"""A report this many steps old shows that the run went back, and the watch starts again."""


class LossWatch:
    """Says what the curve's judge finds at each committed step."""

    def __init__(self, curve: CurveJudge) -> None:
        self.curve = curve

    def step(self, step: StepCommitted) -> list[Observation]:
        """Return the findings at a committed step."""
        curve = self.curve
        curve.add_step(step)
        spike, rising = curve.spike, curve.divergence
        findings = [
            Observation("nonfinite", not curve.is_finite, curve.is_finite, partial(_say_nonfinite, step)),
            self._skipped(step),
            Observation("divergence", rising is not None, rising is None, partial(_say_diverged, rising, step)),
        ]
        if (scale := curve.clip_scale) is not None:
            is_over = scale > 2 * curve.limits.alerts.clip_scale
            findings.append(Observation("clip", curve.is_clip_bound, is_over, partial(_say_clip, scale, step)))
        if step.loss is not None and math.isfinite(step.loss):
            findings.append(
                Observation("loss-spike", spike is not None, spike is None, partial(_say_spike, spike, step))
            )
        return findings

    def _skipped(self, step: StepCommitted) -> Observation:
        skipped, count = self.curve.wasted("overflow"), self.curve.recent_steps
        is_calm = count >= CALM_STEPS and (not skipped or skipped[-1] <= step.step - CALM_STEPS)
        text = f"{len(skipped)} of the last {count} steps skipped: gradient overflow"
        is_bad = len(skipped) >= self.curve.limits.alerts.skipped_steps
        return Observation("skipped", is_bad, is_calm, lambda: Said(text, _facts(step)))


def _say_nonfinite(step: StepCommitted) -> Said:
    values = (("loss", step.loss), ("gradient norm", step.grad_norm))
    wrong = [f"{name} is {value}" for name, value in values if value is not None and not math.isfinite(value)]
    what = wrong[0] if wrong else f"a gradient isn't finite ({step.skipped})"
    return Said(f"{what} at step {step.step:,}" + ("; the step was skipped" if step.skipped else ""), _facts(step))


def _say_clip(scale: float, step: StepCommitted) -> Said:
    text = f"median clip scale {number(scale)} over {CLIP_STEPS} steps: updates are almost nothing"
    advice = "raise optimizer.clip_norm to about the usual gradient norm; steps are too small to learn from"
    return Said(text, _facts(step), (advice,))


def _say_spike(spike: Spike | None, step: StepCommitted) -> Said:
    if spike is None:
        return Said("the loss is back at its trend")
    text = f"loss {number(step.loss or 0.0)} at step {step.step:,}, trend {number(spike.expected)}"
    scatter = f"scatter over {WINDOW_STEPS} steps before the spike {number(spike.scatter)}"
    norm = () if spike.norm_rose else ("the gradient norm hasn't jumped with it",)
    return Said(text, (scatter, *norm, *_facts(step)))


def _say_diverged(divergence: Divergence | None, step: StepCommitted) -> Said:
    if divergence is None:
        return Said("the loss no longer rises")
    best = divergence.best
    text = (
        f"the loss rises: level {number(divergence.level)}, best {number(best.level)} at step {best.step:,},"
        f" {divergence.trend:+.2g} per step"
    )
    advice = f"lower the learning rate, or resume from a checkpoint at about step {best.step:,}"
    return Said(text, (f"above the best level for {divergence.steps:,} steps", *_facts(step)), (advice,))


def _facts(step: StepCommitted) -> tuple[str, ...]:
    values = (("loss", step.loss), ("gradient norm", step.grad_norm))
    settings = [] if step.learning_rate is None else [f"learning rate {number(step.learning_rate)}"]
    settings += [] if step.global_batch is None else [f"global batch {step.global_batch:,}"]
    losses = ", ".join(f"{name} {number(value)}" for name, value in values if value is not None)
    return (*([losses] if losses else []), ", ".join([*settings, f"plan v{step.plan_version}"]))


@dataclasses.dataclass(frozen=True)
class _Departure:
    """The difference between a rank's losses and the ranks' medians over a window."""

    own: float
    middle: float
    by: float  # mean of the differences
    scatter: float  # their standard deviation


class OwnLossWatch:
    """Judges a step once a rank's part of a later step is here."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._step = 0
        self._parts: dict[int, RankStep] = {}  # of that step, by rank
        self._windows: dict[int, _Window] = {}

    def part(self, part: RankStep) -> list[Observation]:
        """Return the findings on the step before, at the first part of a step."""
        findings: list[Observation] = []
        if part.step > self._step:
            findings = self._judge_step()
            self._step, self._parts = part.step, {}
        elif part.step <= self._step - _STEPS_BACK:
            self._windows.clear()
            self._step, self._parts = part.step, {}
        if part.step == self._step and math.isfinite(part.values.get("own_loss", math.nan)):
            self._parts[part.rank] = part
        return findings

    def forget(self, rank: int) -> None:
        """Drop the losses of a rank that is out, or gone."""
        self._windows.pop(rank, None)
        self._parts.pop(rank, None)

    def _judge_step(self) -> list[Observation]:
        if len(self._parts) < 2:
            return []
        findings = []
        middle = median(part.values["own_loss"] for part in self._parts.values())
        for rank, part in self._parts.items():
            departure = self._windows.setdefault(rank, _Window()).add(part.values["own_loss"], middle)
            if departure is not None:
                findings.append(self._finding(part, departure, alone=len(self._parts) == 2))
        return findings

    def _finding(self, part: RankStep, departure: _Departure, *, alone: bool) -> Observation:
        """Judge a rank; with one other rank no one knows which of the two departs, and the higher loss is named."""
        table = self._table
        most = max(table.own_loss_deviations * departure.scatter, table.own_loss_percent / 100 * abs(departure.middle))
        above = departure.by if alone else abs(departure.by)
        return Observation(
            "own-loss", above > most, above < most / 2, partial(_say_apart, departure), part.node, part.rank
        )


class _Window:
    """A rank's newest differences from the ranks' medians, and these medians."""

    def __init__(self) -> None:
        self._count = 0
        self._apart, self._middles = RollingStatistics(OWN_LOSS_STEPS), RollingStatistics(OWN_LOSS_STEPS)

    def add(self, own: float, middle: float) -> _Departure | None:
        """Take a step's losses; return the departure over a whole window."""
        self._count += 1
        self._apart.add(self._count, own - middle)
        self._middles.add(self._count, middle)
        by, scatter, level = self._apart.mean, self._apart.std, self._middles.mean
        if not self._apart.is_full or by is None or scatter is None or level is None:
            return None
        return _Departure(level + by, level, by, scatter)


def _say_apart(departure: _Departure) -> Said:
    percent = f" ({100 * departure.by / abs(departure.middle):+.0f} %)" if departure.middle else ""
    spread = f"standard deviation {number(departure.scatter)}"
    text = f"own loss {number(departure.own)}, ranks' median {number(departure.middle)}"
    fact = f"differs by {number(departure.by)}{percent} over the last {OWN_LOSS_STEPS} steps ({spread})"
    remedies = (
        "check the node's data: trainctl doctor compares the nodes' files",
        "if the files match, suspect a numerical fault in the rank's precision, backend or device",
    )
    return Said(text, (fact,), remedies)
