"""Seconds of one forward and backward pass by micro-batch size: a table of what was measured, what lies between, and
how a run compares with its profile.

It is a table and no formula, because some devices are fastest at a small micro-batch and slower at every larger one.
"""

import statistics
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Final

from trainctl.protocol.calibration.profile import DeviceProfile, LinkRate, Pass, ProfileSummary
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import RankStep

SMALL_GAIN = 0.02
"""Part by which passes must get faster for a larger micro-batch to be tried, or listed as faster."""
CLEAR_GAIN = 0.1
"""Part by which they must for one to be called too small or too large, or to be made smaller."""
LEAST_BEND = 6.0
"""Rise of the sum of squared errors, in variances, below which a knot is noise and is left out."""

Points = Sequence[tuple[int, float]]


def straightened(points: Points, noise: float) -> tuple[tuple[int, float], ...]:
    """Return the points' sizes with the values of the line. `noise`: the values' relative standard error. Knots are
    left out one after another, that which changes the fit least first, while the change is within the noise."""
    if noise <= 0 or len(points) < 3:
        return tuple(points)
    knots = [*range(len(points))]
    fit, error = [value for _, value in points], 0.0
    while len(knots) > 2:
        tries = [(*_fit(points, [*knots[:at], *knots[at + 1 :]], noise), at) for at in range(1, len(knots) - 1)]
        next_error, next_fit, at = min(tries)
        if next_error - error > LEAST_BEND or min(next_fit) <= 0:
            break
        fit, error = next_fit, next_error
        del knots[at]
    return tuple((size, value) for (size, _), value in zip(points, fit, strict=True))


def _fit(points: Points, knots: Sequence[int], noise: float) -> tuple[float, list[float]]:
    """Sum of squared errors, and values, of the line with these knots that is nearest to the points."""
    places = [_place(points, knots, size) for size, _ in points]
    weights = [1 / (noise * value) ** 2 for _, value in points]
    count = len(knots)
    diagonal, beside, right = [0.0] * count, [0.0] * count, [0.0] * count
    for (left, part), weight, (_, value) in zip(places, weights, points, strict=True):
        diagonal[left] += weight * (1 - part) ** 2
        diagonal[left + 1] += weight * part**2
        beside[left] += weight * part * (1 - part)
        right[left] += weight * (1 - part) * value
        right[left + 1] += weight * part * value
    at_knots = _solved(diagonal, beside, right)
    values = [at_knots[left] * (1 - part) + at_knots[left + 1] * part for left, part in places]
    errors = (weight * (value - fit) ** 2 for weight, (_, value), fit in zip(weights, points, values, strict=True))
    return sum(errors), values


def _place(points: Points, knots: Sequence[int], size: int) -> tuple[int, float]:
    """The knot before a size, and the part of the way to the next one."""
    sizes = [points[knot][0] for knot in knots]
    left = min(bisect_right(sizes, size) - 1, len(sizes) - 2)
    return left, (size - sizes[left]) / (sizes[left + 1] - sizes[left])


def _solved(diagonal: list[float], beside: list[float], right: list[float]) -> list[float]:
    """The solution of a symmetric tridiagonal system (Thomas algorithm); the arguments are used up."""
    for row in range(1, len(diagonal)):
        factor = beside[row - 1] / diagonal[row - 1]
        diagonal[row] -= factor * beside[row - 1]
        right[row] -= factor * right[row - 1]
    for row in range(len(diagonal) - 1, -1, -1):
        following = beside[row] * right[row + 1] if row + 1 < len(diagonal) else 0.0
        right[row] = (right[row] - following) / diagonal[row]
    return right


ROUNDING = 1e-9
"""Relative error of sums of seconds, within which two are the same."""

MOST_KEPT = 4096
"""Pairs of share and micro-batch whose seconds a curve remembers; asked at each step, they rarely change."""

Point = tuple[int, float]
"""A micro-batch in samples, and the seconds of its pass."""


@dataclass(frozen=True)
class PassCurve:
    """Seconds by micro-batch size, never less for a larger one; linear between points, and beyond the last one by
    the last samples' cost. Below the first point it is the line of the first two points, with no negative part.
    Raises InvalidInputError if there is no point, or one isn't positive."""

    points: tuple[Point, ...]

    def __post_init__(self) -> None:
        if not self.points or not all(size >= 1 and seconds > 0 for size, seconds in self.points):
            raise InvalidInputError("curve", "a curve needs at least one micro-batch with positive seconds")
        object.__setattr__(self, "points", _rising(sorted(self.points)))

    @classmethod
    def line(cls, a_pass: float, a_sample: float) -> "PassCurve":
        """Return the curve of a device that needs so many seconds for a pass whatever its size, and so many for a
        sample."""
        return cls(((1, a_pass + a_sample), (2, a_pass + 2 * a_sample)))

    @classmethod
    def smoothed(cls, points: Iterable[Point], noise: float) -> "PassCurve":
        """Return a curve through points with a relative standard error of `noise`, as straight as they allow."""
        return _smoothed(tuple(sorted(points)), noise)

    def seconds(self, size: int) -> float:
        """Return the seconds of a pass with so many samples; 0 without any."""
        if size < 1:
            return 0.0
        index = bisect_right(self._sizes, size) - 1
        return self._seconds[index] + self._slopes[index] * (size - self._sizes[index])

    def most(self, seconds: float) -> int:
        """The largest micro-batch whose pass takes no longer."""
        seconds *= 1 + ROUNDING
        index = bisect_right(self._seconds, seconds) - 1
        if index < 0:
            return 0
        return self._sizes[index] + int((seconds - self._seconds[index]) / self._slopes[index])

    def samples_per_second(self, size: int) -> float:
        """While passes of this size are run."""
        return size / self.seconds(size)

    def peak(self, most: int | None = None) -> int:
        """The fastest micro-batch by samples per second, of equals the smallest; at most `most`, else the largest
        that was measured."""
        limit = most or self.points[-1][0]
        sizes = [*(size for size in self._sizes if size < limit), limit]
        return max(sizes, key=lambda size: (self.samples_per_second(size), -size))

    def share_seconds(self, share: int, micro: int) -> float:
        """Return the seconds of a share in passes of `micro`, and one of the rest."""
        found = self._shares.get((share, micro))
        if found is None:
            passes, rest = divmod(share, max(micro, 1))
            found = (passes * self.seconds(micro) if passes else 0.0) + self.seconds(rest)
            if len(self._shares) > MOST_KEPT:
                self._shares.clear()
            self._shares[share, micro] = found
        return found

    def least_per_sample(self, most: int) -> float:
        """Seconds that no sample goes below, in the fastest pass of at most `most` samples."""
        found = self._least.get(most)
        if found is None:
            found = self._least[most] = 1 / self.samples_per_second(self.peak(most))
        return found

    def passes(self, sizes: tuple[int, ...]) -> Sequence[Point]:
        """Micro-batches with their seconds, those of the highest rate first."""
        found = self._passes.get(sizes)
        if found is None:
            of_size = [(size, self.seconds(size)) for size in sizes]
            found = self._passes[sizes] = sorted(of_size, key=lambda one: one[1] / one[0])
        return found

    @cached_property
    def _shares(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def _least(self) -> dict[int, float]:
        return {}

    @cached_property
    def _passes(self) -> dict[tuple[int, ...], Sequence[Point]]:
        return {}

    @cached_property
    def _table(self) -> tuple[list[int], list[float], list[float]]:
        """Sizes, seconds, and seconds of each further sample up to the next size."""
        slopes = [(late - early) / (large - small) for (small, early), (large, late) in pairwise(self.points)]
        (first, seconds), (last, longest) = self.points[0], self.points[-1]
        mean = longest / last
        slopes.append(slopes[-1] if slopes and slopes[-1] > ROUNDING * mean else mean)
        points = list(self.points)
        if first > 1:
            slope = min(slopes[0], seconds / first)
            points, slopes = [(1, seconds - slope * (first - 1)), *points], [slope, *slopes]
        return [size for size, _ in points], [seconds for _, seconds in points], slopes

    @cached_property
    def _sizes(self) -> list[int]:
        return self._table[0]

    @cached_property
    def _seconds(self) -> list[float]:
        return self._table[1]

    @cached_property
    def _slopes(self) -> list[float]:
        return self._table[2]


@lru_cache(maxsize=1024)
def _smoothed(points: tuple[Point, ...], noise: float) -> PassCurve:
    return PassCurve(straightened(points, noise))


def _rising(points: Sequence[Point]) -> tuple[Point, ...]:
    """Isotonic regression by pooling adjacent violators: neighbours that fall get their mean."""
    pools: list[tuple[float, int]] = []  # sum of seconds, points
    for _, seconds in points:
        pools.append((seconds, 1))
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] > pools[-1][0] / pools[-1][1]:
            (total, count), (more, others) = pools[-2:]
            pools[-2:] = [(total + more, count + others)]
    level = [total / count for total, count in pools for _ in range(count)]
    return tuple((size, seconds) for (size, _), seconds in zip(points, level, strict=True))


PASS_NOISE: Final = 0.02
"""Relative standard error of a calibrated pass; what is within it is smoothed."""
FARTHEST_FACTOR: Final = 1.5
"""Most by which whole steps may differ from their passes; more is a disturbance of the calibration."""
FARTHEST_MICRO: Final = 1.5
"""Factor over the largest calibrated micro-batch up to which the curve is believed."""


def passes_seconds(part: RankStep, profile: ProfileSummary) -> float | None:
    """Return the seconds that the passes of a rank's step took when it was calibrated; None if its micro-batch is far
    from those that were timed, isn't known, or was cut for lack of memory."""
    micro = min(part.micro_batch or 0, part.samples)
    smallest, largest = profile.passes[0].micro, profile.passes[-1].micro
    if part.replays or not smallest <= micro <= FARTHEST_MICRO * largest:
        return None
    return curve_of(profile.passes).share_seconds(part.samples, micro)


@lru_cache(maxsize=256)
def curve_of(passes: tuple[Pass, ...]) -> PassCurve:
    """Seconds of a forward and backward pass by micro-batch."""
    return PassCurve.smoothed([(one.micro, one.seconds) for one in passes], PASS_NOISE)


def step_factor(profile: DeviceProfile, curve: PassCurve) -> float:
    """Seconds of a whole step, without the update, relative to those of its passes: of the steps that were measured.
    A step also reads its data, and the passes' times are the fastest of several."""
    if not profile.grid:
        return 1.0
    effective = min(point.micro * point.accumulation for point in profile.grid)
    update = profile.optimizer_seconds or 0.0
    ratios = [(one.seconds - update) / curve.share_seconds(effective, one.micro) for one in profile.grid]
    return min(max(statistics.median(ratios), 1 / FARTHEST_FACTOR), FARTHEST_FACTOR)


def links_of(profiles: Mapping[str, ProfileSummary], lead: str) -> dict[str, LinkRate]:
    """The calibrated link between the lead's node and each other one, by that other node's name."""
    own = {link.peer: link for link in profiles[lead].links} if lead in profiles else {}
    others = {node: link for node, found in profiles.items() for link in found.links if link.peer == lead}
    return {node: link for node, link in (own | others).items() if node != lead}


def bandwidth(link: LinkRate) -> float:
    """Return the slower direction's bandwidth in bytes per second."""
    return min(link.sent_bytes_per_second, link.received_bytes_per_second)


def sent_bytes(sum_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends for one sum."""
    return 2 * (ranks - 1) / ranks * sum_bytes


def sum_seconds(sum_bytes: float, ranks: int, links: Iterable[LinkRate]) -> float:
    """Return the seconds that it takes to sum so many bytes over ranks that are connected by these links: in a ring,
    each rank sends 2 (n - 1) / n of them, in 2 (n - 1) messages one after the other, and the slowest link holds up
    all."""
    links = [*links]
    slowest, latest = min(map(bandwidth, links)), max(link.latency_seconds or 0.0 for link in links)
    # Half of a round trip for each message.
    return 2 * (ranks - 1) * (sum_bytes / ranks / slowest + latest / 2)
