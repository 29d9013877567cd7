"""Curves of losses, and how far two of them are apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np

STEPS = 40
G = 12
SIZES = (12, 1, 5, 7, 2, 12, 3, 11)


def losses(rig: Any, resized: bool, steps: int = STEPS) -> list[float]:
    """Of one rank; `resized` changes the micro-batch every third step."""
    reports = [rig.train(step, SIZES[(step // 3) % len(SIZES)] if resized else G) for step in range(1, steps + 1)]
    assert all(report.skipped is None for report in reports)
    return [report.loss_sum / report.weight for report in reports]


def worst(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.array(one) / np.array(other) - 1)))
