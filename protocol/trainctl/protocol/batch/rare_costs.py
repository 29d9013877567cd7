"""Costs that come rarely, such as faults: how much of them is still to come, as moments and quantiles. Pure.

Each sort is a compound Poisson process whose rate has a Gamma prior, so that what hasn't been seen yet may still come.
"""

import math
from typing import NamedTuple

import msgspec

_MOST_SKEW = 1.0
"""Skewness up to which the expansion holds."""


class Costs(msgspec.Struct, frozen=True):
    """Sums over the costs of one sort so far."""

    events: int = 0
    total: float = 0.0
    squares: float = 0.0

    def after(self, cost: float) -> "Costs":
        """With one more."""
        return Costs(self.events + 1, self.total + cost, self.squares + cost * cost)


class Prior(NamedTuple):
    """What is assumed before any cost has been seen."""

    events: float  # this many
    exposure: float  # within this time
    cost: float  # each of this cost, exponentially distributed


class Moments(NamedTuple):
    """Of what is still to come of one sort."""

    mean: float = 0.0
    variance: float = 0.0
    third: float = 0.0  # third cumulant

    def plus(self, other: "Moments") -> "Moments":
        """Of the sum of two independent parts."""
        return Moments(*(one + more for one, more in zip(self, other, strict=True)))

    def times(self, factor: float) -> "Moments":
        """In another unit."""
        return Moments(factor * self.mean, factor**2 * self.variance, factor**3 * self.third)


def to_come(seen: Costs, exposure: float, left: float, prior: Prior) -> Moments:
    """Of the sum of costs within `left`, after `exposure`. Costs are exponentially distributed as far as their third
    moment goes."""
    shape, expected = seen.events + prior.events, expected_count(seen, exposure, left, prior)
    mean = (seen.total + prior.cost) / (seen.events + 1)
    square = (seen.squares + 2 * prior.cost**2) / (seen.events + 1)
    unknown = expected**2 * (mean**2 / shape + max(square - mean**2, 0.0) / (seen.events + 1))
    return Moments(expected * mean, expected * square + unknown, expected * 1.5 * square**2 / mean)


def expected_count(seen: Costs, exposure: float, left: float, prior: Prior) -> float:
    """How many are still to come."""
    return (seen.events + prior.events) / (exposure + prior.exposure) * left


def made_again(count: float, most_seconds: float) -> Moments:
    """So many returns to a checkpoint: each is made again from anywhere between two checkpoints, uniformly."""
    return Moments(*(count * most_seconds**power / (power + 1) for power in (1, 2, 3)))


def quantiles(whole: Moments, distance: float) -> tuple[float, float]:
    """`distance` standard deviations below and above the mean, by the Cornish-Fisher expansion. Neither is beyond the
    mean, or below 0."""
    deviation = math.sqrt(whole.variance)
    skew = min(whole.third / deviation**3, _MOST_SKEW) if deviation > 0 else 0.0
    shift = (distance**2 - 1) * skew / 6
    low, high = (whole.mean + deviation * (shift + sign * distance) for sign in (-1, 1))
    return min(max(low, 0.0), whole.mean), max(high, whole.mean)
