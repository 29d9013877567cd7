"""Steps of one effective batch, cut into micro-batches of each size that fits."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

from trainctl.protocol.calibration.profile import GridPoint, Pass
from trainctl.trainer.calibration.step_runner import StepRunner, StepTime

REPEATS: Final = 3
"""Steps of each kind, of which the median counts, if they are short."""
LONG_SECONDS: Final = 0.5
"""Time of a step above which it is measured once."""
GRID_SECONDS: Final = 6.0
"""Time for all sizes; one that would take longer isn't begun, but the fastest is always measured."""


def grid(
    runner: StepRunner, passes: Sequence[Pass], effective: int, trying: Callable[[int], None]
) -> tuple[tuple[GridPoint, ...], float | None]:
    """A point for each measured micro-batch of at most `effective` samples, the fastest first; and the time of the
    update. `trying` receives each size before it is measured."""
    points, updates, deadline = list[GridPoint](), list[float](), time.monotonic() + GRID_SECONDS
    for one in sorted(passes, key=lambda one: -one.rate):
        is_in_time = time.monotonic() + effective / one.rate < deadline
        if one.micro <= effective and (is_in_time or not points):
            trying(one.micro)
            steps = _steps(runner, one.micro, effective)
            seconds = statistics.median(step.seconds for step in steps)
            points.append(GridPoint(one.micro, math.ceil(effective / one.micro), seconds))
            updates += [step.optimizer_seconds for step in steps]
    points.sort(key=lambda point: point.micro)
    return tuple(points), statistics.median(updates) if updates else None


def _steps(runner: StepRunner, micro: int, effective: int) -> list[StepTime]:
    first = runner.step(micro, effective)
    more = REPEATS - 1 if first.seconds < LONG_SECONDS else 0
    return [first, *(runner.step(micro, effective) for _ in range(more))]
