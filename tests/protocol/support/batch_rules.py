"""Rules by which other systems share a batch among unlike ranks, each written from its paper.

Every rule is given what a rank has calibrated, and its reported steps with even shares. It returns the shares, and
each rank's micro-batch.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol.batch.pass_curve import Point
from trainctl.protocol.batch.split import apportion
from trainctl.protocol.batch.step_model import Timing


class Seen(NamedTuple):
    """Measurements of a rank that a rule may use."""

    points: Sequence[Point]
    timings: Sequence[Timing]
    most: int  # samples of a pass, by memory

    @property
    def seconds(self) -> float:
        """Return the seconds of a step's passes, with an even share."""
        return statistics.mean(row.busy for row in self.timings)

    @property
    def share(self) -> int:
        return self.timings[0].samples


class Dealt(NamedTuple):
    shares: Mapping[int, int]
    micros: Mapping[int, int]


def _most(ranks: Sequence[Seen]) -> dict[int, int]:
    return {at: rank.most for at, rank in enumerate(ranks)}


def even(total: int, ranks: Sequence[Seen]) -> Dealt:
    """Deal the same share to all."""
    return Dealt(apportion(total, dict.fromkeys(range(len(ranks)), 1.0)), _most(ranks))


def proportional(total: int, ranks: Sequence[Seen]) -> Dealt:
    """By samples per second of the reported steps."""
    return Dealt(apportion(total, {at: rank.share / rank.seconds for at, rank in enumerate(ranks)}), _most(ranks))


def lb_bsp(total: int, ranks: Sequence[Seen]) -> Dealt:
    """Load-balanced bulk synchronous parallel (SoCC 2020): a worker's seconds are a line of its batch, profiled
    beforehand and scaled to its newest steps; batches for which all lines give the same time."""
    lines = {}
    for at, rank in enumerate(ranks):
        slope, start = statistics.linear_regression(*zip(*rank.points, strict=True))
        slope, start = max(slope, 1e-9), max(start, 0.0)
        now = rank.seconds / (start + slope * rank.share)
        lines[at] = (slope * now, start * now)
    left, rich = total, dict(lines)
    while True:  # a worker that would have less than a sample has one
        level = (left + sum(start / slope for slope, start in rich.values())) / sum(1 / s for s, _ in rich.values())
        poor = [at for at, (slope, start) in rich.items() if level - start < slope]
        if not poor:
            break
        left -= len(poor)
        rich = {at: line for at, line in rich.items() if at not in poor}
    weights = {at: max((level - start) / slope, 1.0) for at, (slope, start) in lines.items()}
    return Dealt(apportion(total, weights), _most(ranks))


def omnilearn(total: int, ranks: Sequence[Seen]) -> Dealt:
    """OmniLearn (2025): a proportional controller. A worker's batch changes by its throughput times the difference of
    its seconds from the mean, unless all are within 5 % of that."""
    mean = statistics.mean(rank.seconds for rank in ranks)
    if all(abs(rank.seconds - mean) <= 0.05 * mean for rank in ranks):
        return even(total, ranks)
    weights = {
        at: max(rank.share - rank.share / rank.seconds * (rank.seconds - mean), 1.0) for at, rank in enumerate(ranks)
    }
    return Dealt(apportion(total, weights), _most(ranks))


def adaptdl(total: int, ranks: Sequence[Seen]) -> Dealt:
    """AdaptDL (Pollux, OSDI 2021): all replicas have the same batch; its micro-batch and accumulation are those of
    the highest throughput, by a line of seconds over the micro-batch."""
    shares = even(total, ranks).shares
    lines = [statistics.linear_regression(*zip(*rank.points, strict=True)) for rank in ranks]

    def seconds(micro: int) -> float:
        passes = -(-max(shares.values()) // micro)
        return max(passes * (max(start, 0.0) + max(slope, 0.0) * micro) for slope, start in lines)

    micro = min(range(1, min(rank.most for rank in ranks) + 1), key=seconds)
    return Dealt(shares, dict.fromkeys(range(len(ranks)), micro))


RULES = {"even": even, "proportional": proportional, "LB-BSP": lb_bsp, "OmniLearn": omnilearn, "AdaptDL": adaptdl}
