"""Ratios of interleaved pairs: the median and its 95 % interval."""

import statistics
from collections.abc import Sequence

import numpy as np


def interval(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median of ratios and its 95 % interval, by resampling."""
    drawn = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return {"median": round(statistics.median(ratios), 3), "low": round(float(low), 3), "high": round(float(high), 3)}
