"""The time that a step takes one rank, by its share and micro-batch, from a curve and what its last steps reported."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Phases

NEAR = 0.12
"""Relative distance from the median within which values of steps are averaged."""
LEAST_STEPS = 6
"""Steps below which no curve is fitted to them."""
SURE_ERRORS = 5.0
"""Standard errors by which the cost of a pass must be above 0."""
LEAST_SPREAD = 0.25
"""Relative difference of samples a pass below which steps don't tell the cost of a pass from that of a sample."""


PROPORTIONAL = PassCurve(((1, 1.0),))
"""Curve of a device whose seconds are only known to grow with its samples: a second for each."""


class StepModel(NamedTuple):
    """A share is run as passes of the micro-batch and one pass of the rest."""

    curve: PassCurve
    floor_seconds: float = 0.0  # transfer, optimizer and plan: whatever the share
    slowdown: float = 1.0  # seconds of a pass now, relative to the curve's

    @classmethod
    def linear(cls, samples_per_second: float, floor_seconds: float = 0.0) -> "StepModel":
        """Return the model of a rank whose rate is known at one micro-batch only: the same is expected of all. Raises
        InvalidInputError if the rate isn't positive."""
        if not 0 < samples_per_second < math.inf:
            raise InvalidInputError("rate", "a rank needs a measured rate above 0")
        return cls(PROPORTIONAL, floor_seconds, 1 / samples_per_second)

    def busy_seconds(self, share: int, micro: int) -> float:
        """Return the seconds of all passes: data, forward and backward."""
        return self.slowdown * self.curve.share_seconds(share, micro)

    def seconds(self, share: int, micro: int) -> float:
        """The length of a step that no one else makes longer."""
        return self.slowdown * self.curve.share_seconds(share, micro) + self.floor_seconds

    def samples_per_second(self, micro: int) -> float:
        """Return the rank's rate alone with passes of this size."""
        return self.curve.samples_per_second(max(micro, 1)) / self.slowdown

    def rated(self, most: int) -> tuple[float, float]:
        """The highest rate with passes of at most `most` samples, in samples per second, and `floor_seconds`."""
        return 1 / (self.slowdown * self.curve.least_per_sample(most)), self.floor_seconds

    def best_micro(self, share: int, most: int) -> int:
        """The micro-batch of at most `most` samples that runs a share soonest; of equals the smallest."""
        sizes = range(1, min(share, most) + 1)
        return min(sizes, key=lambda size: (round(self.busy_seconds(share, size), 12), size), default=1)

    @property
    def is_linear(self) -> bool:
        """Return whether nothing is known of other micro-batches."""
        return len(self.curve.points) == 1


class Timing(NamedTuple):
    """One rank's part of one step, in seconds."""

    samples: int
    micro: int  # samples of a pass; 0: not known
    busy: float  # data, forward and backward
    sync: float
    optimizer: float
    wait: float

    @classmethod
    def of(cls, samples: int, phases: Phases, micro: int = 0) -> "Timing":
        """Return the timing of a rank's report."""
        busy = phases.data + phases.forward + phases.backward
        return cls(samples, micro, busy, phases.sync, phases.optimizer, phases.wait)

    @property
    def work(self) -> tuple[int, int]:
        """Return the work that the seconds are of: the share, and samples of a full pass."""
        return self.samples, self.size

    @property
    def size(self) -> int:
        """Samples of a full pass."""
        return min(self.micro, self.samples) if self.micro else self.samples

    @property
    def passes(self) -> int:
        """Full ones, and one of the rest."""
        return -(-self.samples // self.size)


def middle(values: Iterable[float]) -> float:
    """The mean of the values near their median: odd values and former ones of less than half the steps don't count."""
    ordered = sorted(values)
    count = len(ordered)
    median = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    low, high = (1 - NEAR) * median, (1 + NEAR) * median
    if low <= ordered[0] and ordered[-1] <= high:
        return sum(ordered) / count
    near = ordered[bisect_left(ordered, low) : bisect_right(ordered, high)]
    return sum(near) / len(near) if near else median


def models(
    timings: Mapping[int, Sequence[Timing]], curves: Mapping[int, PassCurve] | None = None
) -> dict[int, StepModel]:
    """Ranks' models by the middle of their last steps; none for a rank that has computed nothing.

    `curves`: of the ranks that are known at several micro-batches; the last steps say how much slower than those a
    rank is now. In `sync` the faster ranks also wait for the slowest, and so they may for the plan: what the least
    waiting rank spends there counts for all of them.
    """
    known = {rank: rows for rank, rows in timings.items() if rows}
    if not known:
        return {}
    columns = {rank: [*zip(*rows, strict=True)] for rank, rows in known.items()}  # as the fields of Timing
    shared = min([middle(column[3]) for column in columns.values()])
    shared += min([middle(column[5]) for column in columns.values()])
    made = {}
    for rank, rows in known.items():
        samples, _, busy, _, optimizer, _ = columns[rank]
        curve = curves.get(rank, PROPORTIONAL) if curves else PROPORTIONAL
        if curve is PROPORTIONAL:
            slowdowns = [seconds / count for seconds, count in zip(busy, samples, strict=True) if count and seconds > 0]
        else:
            slowdowns = [row.busy / curve.share_seconds(*row.work) for row in rows if row.samples and row.busy > 0]
        if slowdowns:
            made[rank] = StepModel(curve, shared + middle(optimizer), middle(slowdowns))
    return made


def fit(timings: Collection[Timing]) -> PassCurve | None:
    """A curve from reported steps of different shares or micro-batches; None if they differ too little, or the cost
    of a pass can't be told from noise.

    Seconds of a step are taken as a for each pass and b for each sample, with the least sum of squared relative
    errors. Each micro-batch that was seen is then a point, so that more than two make a table.
    """
    rows = [row for row in timings if row.samples and row.micro and row.busy > 0]
    sizes = [row.samples / row.passes for row in rows]
    if len(rows) < LEAST_STEPS or max(sizes) < (1 + LEAST_SPREAD) * min(sizes):
        return None
    found = _line(rows)
    if found is None:
        return None
    line = PassCurve.line(*found)
    by_size: dict[int, list[float]] = {}
    for row in rows:
        full, rest = divmod(row.samples, row.size)
        by_size.setdefault(row.size, []).append((row.busy - line.seconds(rest)) / full)
    points = [(size, middle(seconds)) for size, seconds in by_size.items()]
    is_table = len(points) > 2 and all(seconds > 0 for _, seconds in points)
    return PassCurve(tuple(points)) if is_table else line


def _line(rows: Collection[Timing]) -> tuple[float, float] | None:
    """Seconds of a pass and of a sample; None unless both are above 0, the first by far more than its error."""
    terms = [(row.passes / row.busy, row.samples / row.busy) for row in rows]
    pp, ps, ss = (sum(one[i] * one[j] for one in terms) for i, j in ((0, 0), (0, 1), (1, 1)))
    p, s = (sum(one[i] for one in terms) for i in (0, 1))
    determinant = pp * ss - ps * ps
    a_pass, a_sample = (p * ss - s * ps) / determinant, (s * pp - p * ps) / determinant
    squares = sum((1 - a_pass * one[0] - a_sample * one[1]) ** 2 for one in terms)
    error = math.sqrt(squares / (len(terms) - 2) * ss / determinant)
    return (a_pass, a_sample) if a_sample > 0 and a_pass > SURE_ERRORS * error else None
