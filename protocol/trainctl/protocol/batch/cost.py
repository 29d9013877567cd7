"""The cost of a run, by the time that each of its nodes took part and the node's price; and its rates. Pure.

A node takes part from when the run starts, or one of its ranks joins, until its last rank is drained or lost or the run
ends. Pauses count, for a rented machine costs money while it waits.
"""

import math
from collections.abc import Collection

import msgspec

from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.messages import RunCost, RunRates, RunView, StepCommitted

HOUR_SECONDS = 3600.0


class NodeTime(msgspec.Struct, frozen=True):
    """For how long a node has taken part in a run."""

    node: str
    seconds: float = 0.0  # up to `since_at`, or in all if it takes no part now
    since_at: float | None = None  # from when on it takes part, Unix seconds; None: it takes no part now

    def until(self, at: float) -> float:
        """Return the seconds up to `at`, in Unix seconds. A clock that went back takes none away."""
        return self.seconds + (max(0.0, at - self.since_at) if self.since_at is not None else 0.0)


Times = tuple[NodeTime, ...]


class CostFigures(msgspec.Struct, frozen=True):
    """The figures of a run's cost, all in its currency; None: unknown."""

    currency: str
    spent: float
    per_hour: float
    to_end: float | None  # from now to the last step
    per_1000: float | None  # per 1,000 samples or pairs, of all that the run has cost
    unpriced: tuple[str, ...]  # nodes whose cost is missing from all of these


def counted(times: Times, taking_part: Collection[str], at: float) -> Times:
    """The nodes' times once those in `taking_part`, and no others, take part from `at` (Unix seconds) on."""
    known = [_turned(time, time.node in taking_part, at) for time in times]
    new = sorted(set(taking_part) - {time.node for time in times})
    return (*known, *(NodeTime(node, 0.0, at) for node in new))


def run_cost(times: Times, prices: Prices, at: float) -> RunCost | None:
    """The cost up to `at`, Unix seconds; None if none of the nodes has a price."""
    priced = [(time, prices.per_hour[time.node]) for time in times if time.node in prices.per_hour]
    if not priced:
        return None
    return RunCost(
        currency=prices.currency,
        spent=sum(price * time.until(at) / HOUR_SECONDS for time, price in priced),
        at=at,
        per_hour=sum(price for time, price in priced if time.since_at is not None),
        unpriced=tuple(time.node for time in times if time.node not in prices.per_hour),
    )


def spent_by(cost: RunCost, at: float) -> float:
    """Return the cost of the run by `at`, Unix seconds; never less than is known to be spent."""
    return cost.spent + cost.per_hour * max(0.0, at - cost.at) / HOUR_SECONDS


def figures(cost: RunCost, at: float, seconds_left: float | None, samples: int | None) -> CostFigures:
    """Return the figures at `at`, Unix seconds. `seconds_left`: until the last step; `samples`: trained on so far.
    None: unknown."""
    spent = spent_by(cost, at)
    to_end = cost.per_hour * seconds_left / HOUR_SECONDS if seconds_left is not None else None
    return CostFigures(
        currency=cost.currency,
        spent=spent,
        per_hour=cost.per_hour,
        to_end=to_end,
        per_1000=1000 * spent / samples if samples else None,
        unpriced=cost.unpriced,
    )


def ended(cost: RunCost, at: float) -> RunCost:
    """Return the cost of a run that ended at `at`, Unix seconds, though its lead's agent could not say so any more."""
    return msgspec.structs.replace(cost, spent=spent_by(cost, at), at=max(at, cost.at), per_hour=0.0)


def _turned(time: NodeTime, takes_part: bool, at: float) -> NodeTime:
    if takes_part == (time.since_at is not None):
        return time
    return NodeTime(time.node, time.until(at), at if takes_part else None)


_UNDER_WAY = ("starting", "running")


def run_rates(view: RunView, last: StepCommitted | None, step_seconds: float | None = None) -> RunRates:
    """Return the rates of a run. `step_seconds`: what a step takes lately, by default what the last one took. The time
    left is the lead's own estimate, which its steps carry (eta.py); without one, as of a guest, it is the steps left
    times the seconds of one."""
    seconds = _positive(step_seconds if step_seconds is not None else last.step_seconds if last is not None else None)
    samples = view.global_batch if view.global_batch is not None else last.samples or None if last is not None else None
    step = last.step if last is not None else view.step
    left = max(view.steps - step, 0) if view.steps is not None else None
    per_sample = _ratio(seconds, samples)
    measured = last.values if last is not None and view.state in _UNDER_WAY else {}
    simple = _times(left, seconds) if view.state in _UNDER_WAY else None
    return RunRates(
        unit=view.rate_unit,
        average_per_second=_average(view, last),
        steps_per_second=_ratio(1.0, seconds),
        samples_per_second=_ratio(samples, seconds),
        seconds_per_sample=per_sample,
        seconds_per_epoch=_times(view.samples or None, per_sample),
        epochs_left=_ratio(_times(left, samples), view.samples),
        seconds_left=measured.get("time_left_seconds", simple),
        seconds_left_best=measured.get("time_left_best_seconds"),
        seconds_left_worst=measured.get("time_left_worst_seconds"),
    )


def _average(view: RunView, last: StepCommitted | None) -> float | None:
    """Return the rate over all steps that stand, by their own seconds."""
    if last is None:
        return None
    in_tokens = view.rate_metric == "tokens_per_second"
    if (last.tokens if in_tokens else last.weight) is None:
        return None  # its steps don't say
    whole = last.tokens_total if in_tokens else last.weight_total
    return _ratio(whole, last.seconds_total)


def _positive(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _times(one: float | None, other: float | None) -> float | None:
    return one * other if one is not None and other is not None else None
