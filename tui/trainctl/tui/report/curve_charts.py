"""The charts of a report: loss, speed, efficiency and shares over the steps, with the interventions as marks. Pure."""

import itertools
from collections.abc import Iterator
from typing import Final

from trainctl.protocol import messages as m
from trainctl.tui.report.document import ChartLine, ChartMark, ReportChart
from trainctl.tui.report.run_facts import InterventionKind, RunFacts

NAMES: Final[dict[InterventionKind, str]] = {
    "command": "command", "split": "split", "settings": "settings", "membership": "membership",
    "rollback": "rollback", "state": "run state", "fault": "fault", "note": "note", "checkpoint": "checkpoint",
}  # fmt: skip
"""Kinds of interventions as a report calls them."""
MOST_NODES: Final = 8
"""Nodes with an area of their own in the chart of shares; those with fewer samples are one together."""

_EFFICIENCY: Final = (
    "Efficiency: the part of the ranks' time in steps that was spent computing: forward, backward and optimizer"
)


def loss_charts(facts: RunFacts) -> Iterator[ReportChart]:
    """Training and held-out loss; none without a step."""
    lines = [line for line in (_line("loss", facts.curves["loss"]), _held_out(facts)) if line.steps]
    if lines:
        unit = facts.view.loss_unit if facts.view is not None else ""
        yield ReportChart("Loss", unit, tuple(lines), _last(facts), _marks(facts))
    rate = _line("learning rate", facts.curves["learning_rate"])
    if rate.steps:
        yield ReportChart("Learning rate", "", (rate,), _last(facts))


def speed_charts(facts: RunFacts) -> Iterator[ReportChart]:
    """The run's rate, and the part of the time in which ranks computed."""
    metric = facts.view.rate_metric if facts.view is not None else "tokens_per_second"
    unit = facts.view.rate_unit if facts.view is not None else "tokens/s"
    rate = _line(unit, facts.curves[metric])
    if rate.steps:
        yield ReportChart("Rate", unit, (rate,), _last(facts), _marks(facts))
    if facts.efficiency_curve:
        steps, values = zip(*facts.efficiency_curve, strict=True)
        apart = min((after - before for before, after in itertools.pairwise(steps)), default=1)
        line = ChartLine("computing", steps, values, bucket_steps=apart)
        yield ReportChart(_EFFICIENCY, "", (line,), _last(facts), percent=True)


def share_charts(facts: RunFacts) -> Iterator[ReportChart]:
    """Samples of each step by rank; none if it has one rank alone."""
    totals: dict[str, int] = {}
    for one in facts.shares:
        for name, count in one.samples.items():
            totals[name] = totals.get(name, 0) + count
    if len(totals) < 2:
        return
    own = sorted(totals, key=lambda name: -totals[name])[:MOST_NODES]
    names = [name for name in totals if name in own]
    steps = tuple(one.step for one in facts.shares)
    lines = [ChartLine(name, steps, tuple(float(one.samples.get(name, 0)) for one in facts.shares)) for name in names]
    if len(totals) > len(names):
        rest = tuple(float(sum(count for name, count in one.samples.items() if name not in own))
                     for one in facts.shares)  # fmt: skip
        lines.append(ChartLine(f"{len(totals) - len(names)} others", steps, rest))
    yield ReportChart("Samples of each step", "samples", tuple(lines), _last(facts), stacked=True)


def _line(name: str, series: m.Series) -> ChartLine:
    """Without extremes where a bucket is one step."""
    several = series.bucket_steps > 1
    low, high = (series.minimum, series.maximum) if several else ((), ())
    return ChartLine(name, series.steps, series.mean, low, high, series.bucket_steps)


def _held_out(facts: RunFacts) -> ChartLine:
    series = facts.curves["eval_loss"]
    return ChartLine("held-out loss", series.steps, series.mean, bucket_steps=series.bucket_steps, dots=True)


def _last(facts: RunFacts) -> int:
    return max(facts.last.step if facts.last is not None else 1, 2)


def _marks(facts: RunFacts) -> tuple[ChartMark, ...]:
    return tuple(
        ChartMark(one.step, NAMES[one.kind], f"step {one.step:,}, {NAMES[one.kind]} by {one.by}: {one.text}")
        for one in facts.interventions
    )
