"""What the record of a run says of one step: its loss, the held-out loss, and the curve up to it."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation

_POINTS = 10
"""Of the curve."""


class Point(NamedTuple):
    """Of the curve: the mean loss over some steps, of which the first is `step`."""

    step: int
    loss: float


@dataclass(frozen=True)
class History:
    """Of a run up to one step."""

    loss: float | None  # in the objective's unit, of the step itself; None: not recorded
    held_out: Evaluation | None  # newest up to the step
    curve: tuple[Point, ...]


def read_history(record: RecordReader, step: int) -> History:
    """Raises InvalidInputError if the record cannot be read."""
    steps, _ = record.steps(after=step - 1, limit=1)
    loss = next((one.loss for one in steps if one.step == step), None)
    evaluated = [one for one in record.evaluations() if one.step <= step and math.isfinite(one.loss)]
    series = record.series("loss", last_step=step, columns=_POINTS)
    curve = tuple(Point(max(1, first), mean) for first, mean in zip(series.steps, series.mean, strict=True))
    return History(loss, evaluated[-1] if evaluated else None, curve)
