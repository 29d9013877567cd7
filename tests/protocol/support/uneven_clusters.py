"""Seeded clusters of unlike ranks with known pass times, what they would report, and the best split of them."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainctl.protocol.batch.pass_curve import PassCurve, Point
from trainctl.protocol.batch.split import ShareCost, apportion, group_costs
from trainctl.protocol.batch.step_model import Timing, models
from trainctl.protocol.calibration.peak import between
from trainctl.protocol.calibration.profile import Pass
from trainctl.protocol.messages import Phases

HALVINGS = 2
"""Times that a calibration measures sizes half-way between the fastest micro-batch and its neighbours."""
STEPS = 8
"""Steps that each rank has reported."""


@dataclass(frozen=True)
class Rank:
    """A device: a pass costs `a_pass` and each sample `a_sample`, and above `peak` samples each doubling more."""

    a_pass: float
    a_sample: float
    peak: int
    fall: float  # part by which a pass gets longer with each doubling above the peak
    floor: float  # optimizer, whatever the share
    slowdown: float  # now, relative to the calibration
    micro: int  # samples of a pass, or the most that memory allows
    is_free: bool  # whether the micro-batch may be chosen

    def pass_seconds(self, size: int) -> float:
        if not size:
            return 0.0
        return (self.a_pass + self.a_sample * size) * (1 + self.fall * max(0.0, math.log2(size / self.peak)))

    def seconds(self, share: int, micro: int) -> float:
        passes, rest = divmod(share, micro)
        busy = passes * self.pass_seconds(micro) + self.pass_seconds(rest)
        return self.slowdown * busy + self.floor

    def best_seconds(self, share: int) -> float:
        sizes = range(1, min(self.micro, share) + 1) if self.is_free else (self.micro,)
        return min(self.seconds(share, size) for size in sizes)

    def calibrated(self, noise: float, chance: random.Random) -> list[Point]:
        """Micro-batches 1, 2, 4 and so on up to the most, and half-way to the fastest one's neighbours, as a
        calibration tries them; each measured once."""
        made = [*(2**power for power in range(11) if 2**power < self.micro), self.micro]
        passes: list[Pass] = []
        for _ in range(1 + HALVINGS):
            sizes = between(passes) if passes else made
            passes += [Pass(size, self.pass_seconds(size) * chance.lognormvariate(0, noise)) for size in sizes]
        return sorted((one.micro, one.seconds) for one in passes)

    def timings(self, share: int, noise: float, chance: random.Random) -> list[Timing]:
        """Reported steps, with the micro-batch that is set."""
        micro = min(self.micro, share)
        busy = self.seconds(share, micro) - self.floor
        phases = [Phases(forward=busy * chance.lognormvariate(0, noise), optimizer=self.floor) for _ in range(STEPS)]
        return [Timing.of(share, each, micro) for each in phases]


def cluster(chance: random.Random, ranks: int) -> list[Rank]:
    """Rates differ up to six times, and a pass costs as much as up to twenty samples."""
    is_free = chance.random() < 0.5
    made = []
    for _ in range(ranks):
        a_sample = 0.01 * 6 ** chance.random()
        fall = chance.choice((0.0, 0.0, chance.uniform(0.02, 0.2)))
        made.append(
            Rank(
                a_sample * 20 * chance.random() ** 2, a_sample, 2 ** chance.randint(2, 5), fall,
                0.05 * chance.random(), chance.uniform(0.9, 1.4), 2 ** chance.randint(2, 6), is_free,
            )
        )  # fmt: skip
    return made


class Known(NamedTuple):
    points: list[list[Point]]
    timings: list[list[Timing]]


def known(ranks: Sequence[Rank], total: int, noise: float, chance: random.Random) -> Known:
    """A calibration of each, and its reported steps with even shares."""
    shares = apportion(total, dict.fromkeys(range(len(ranks)), 1.0))
    points = [rank.calibrated(noise, chance) for rank in ranks]
    return Known(points, [rank.timings(shares[at], noise, chance) for at, rank in enumerate(ranks)])


def costs(ranks: Sequence[Rank], total: int, seen: Known, noise: float) -> dict[int, ShareCost]:
    curves = {at: PassCurve.smoothed(points, noise) for at, points in enumerate(seen.points)}
    made = models(dict(enumerate(seen.timings)), curves)
    micros = {at: rank.micro for at, rank in enumerate(ranks)}
    return group_costs(total, made, micros, {at: rank.micro for at, rank in enumerate(ranks) if rank.is_free})


def step_seconds(ranks: Sequence[Rank], shares: Mapping[int, int], micros: Mapping[int, int]) -> float:
    return max(rank.seconds(shares[at], min(micros[at], shares[at])) for at, rank in enumerate(ranks))


def best_seconds(ranks: Sequence[Rank], total: int) -> float:
    """Try all splits and micro-batches for the best one."""
    by_rank = [[math.inf, *(rank.best_seconds(share) for share in range(1, total + 1))] for rank in ranks]
    best = by_rank[0]
    for alone in by_rank[1:]:
        best = [
            min((max(alone[own], best[both - own]) for own in range(1, both)), default=math.inf)
            for both in range(total + 1)
        ]
    return best[total]
