"""An evaluation's result, from the sums that the ranks report; pure."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trainctl.protocol.config.objectives import HELD_OUT, objective_of
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import EvaluatedPair, EvaluationReport, Report, Values, followed_pairs


class Result(NamedTuple):
    """Over all held-out samples."""

    loss: float  # nats per unit of weight, each term divided by its own; NaN without any weight
    weight: float  # the first one, which rates are per
    values: dict[str, float]  # metrics beside the loss, by name


def result(config: RunFile, reports: Sequence[Report]) -> Result:
    """Of the ranks' reports, in an order that is always the same."""
    objective = objective_of(config.objective, config.data.kind)
    unit = objective.weight_unit
    parts = [_parts(report, unit) for report in reports]
    losses, weights, sums = (_summed(part) for part in zip(*parts, strict=True))
    terms = [_mean(losses.get(name, 0.0), weights.get(name, 0.0)) for name in objective.weights]
    values = {
        HELD_OUT + metric.name: _mean(sums[metric.name], weights.get(metric.weight, 0.0))
        for metric in objective.evaluated
        if metric.name in sums
    }
    return Result(sum(terms), weights.get(unit, 0.0), values)


def pairs(reports: Sequence[Report]) -> tuple[EvaluatedPair, ...]:
    """Of all ranks' pairs the first ones and the worst ones, by index."""
    said = [pair for report in reports if isinstance(report, EvaluationReport) for pair in report.pairs]
    return followed_pairs(said)


def _parts(report: Report, unit: str) -> tuple[Values, Values, Values]:
    """Losses, weights and sums by name; of a simulated rank, the loss alone."""
    if isinstance(report, EvaluationReport):
        return report.losses, report.weights, report.sums
    return {unit: report.loss_sum}, {unit: report.weight}, {}


def _summed(parts: Iterable[Values]) -> dict[str, float]:
    found: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, 0.0) + value
    return found


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan
