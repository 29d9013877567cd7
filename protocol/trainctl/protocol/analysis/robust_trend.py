"""The trend of a curve and its scatter, by medians that a few outliers don't move."""

from collections.abc import Sequence
from statistics import median
from typing import Final, NamedTuple

from trainctl.protocol.analysis.rolling import MAD_SCALE

LEAST_STEPS: Final = 30
"""Steps needed before a trend is known."""


class RobustTrend(NamedTuple):
    """What the next value of a curve should be about, and by how much its values scatter (as a standard deviation)."""

    expected: float
    scatter: float
    slope: float  # per value


def robust_trend(values: Sequence[float]) -> RobustTrend:
    """By the medians of the two halves of at least 2 values, oldest first. A falling loss may level off, so no less is
    expected than the later half's median."""
    count, half = len(values), len(values) // 2
    early, late = median(values[:half]), median(values[half:])
    slope = (late - early) / (count / 2)
    start = late - 0.75 * slope * count
    above = [value - start - slope * index for index, value in enumerate(values)]
    middle = median(above)
    scatter = MAD_SCALE * median([abs(value - middle) for value in above])
    return RobustTrend(max(late + 0.25 * slope * count, late), scatter, slope)
