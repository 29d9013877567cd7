"""Steps of one effective batch, cut into micro-batches of each size that fits."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from trainctl.protocol.calibration.profile import GridPoint, Pass
from trainctl.trainer.calibration.step_runner import StepRunner, StepTime

REPEATS: Final = 3
"""Steps of each kind, of which the median counts, if they are short."""
LONG_SECONDS: Final = 0.5
"""Time of a step above which it is measured once."""
GRID_SECONDS: Final = 6.0
"""Time for all sizes of a calibration of 60 s; one that would take longer isn't begun, but the fastest is always
measured, by a step of fewer samples if need be."""


class Grid(NamedTuple):
    """What the steps have shown."""

    points: tuple[GridPoint, ...]  # by micro-batch, ascending
    update_seconds: float | None  # of a step beside its passes; None: no step was measured
    passes: tuple[Pass, ...]  # those that were known, with the seconds of faster ones in the steps


def grid(
    runner: StepRunner, passes: Sequence[Pass], effective: int, trying: Callable[[int], None],
    seconds: float = GRID_SECONDS,
) -> Grid:  # fmt: skip
    """A point for each measured micro-batch of at most `effective` samples, the fastest first. `trying` receives each
    size before it is measured."""
    points, updates, deadline = list[GridPoint](), list[float](), time.monotonic() + seconds
    known = {one.micro: one for one in passes}
    for one in sorted(passes, key=lambda one: -one.rate):
        left = deadline - time.monotonic()
        is_in_time = effective / one.rate < left
        if one.micro <= effective and (is_in_time or not points):
            trying(one.micro)
            if not is_in_time:
                effective = one.micro * max(1, int(left * one.rate / one.micro))
            steps = _steps(runner, one.micro, effective)
            median = statistics.median(step.seconds for step in steps)
            points.append(GridPoint(one.micro, math.ceil(effective / one.micro), median))
            updates += [step.optimizer_seconds for step in steps]
            known[one.micro] = _fastest(one, effective, steps)
    points.sort(key=lambda point: point.micro)
    return Grid(tuple(points), statistics.median(updates) if updates else None, tuple(known.values()))


def _fastest(one: Pass, effective: int, steps: Sequence[StepTime]) -> Pass:
    """A pass with the mean seconds of one in the fastest step, if that was faster: otherwise what disturbed its
    measurement would make steps look faster than their passes."""
    count, rest = divmod(effective, one.micro)
    if rest:
        return one
    fastest = min(step.seconds - step.optimizer_seconds for step in steps) / count
    return one if fastest >= one.seconds else msgspec.structs.replace(one, seconds=max(fastest, 1e-9))


def _steps(runner: StepRunner, micro: int, effective: int) -> list[StepTime]:
    first = runner.step(micro, effective)
    more = REPEATS - 1 if first.seconds < LONG_SECONDS else 0
    return [first, *(runner.step(micro, effective) for _ in range(more))]
