"""The split of a global batch whose slowest rank is the least slow, by the ranks' step models."""

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol.batch.apportion import check_enough
from trainctl.protocol.batch.pass_curve import ROUNDING
from trainctl.protocol.batch.step_model import StepModel

MOST_SIZES = 2048
"""Micro-batches of all ranks together up to which all of them are tried: each takes part of a microsecond, often."""
MOST_ROUNDS = 12
"""Levels that are tried before the rest is dealt sample by sample; each halves what is uncertain, or does better."""


class ShareCost(NamedTuple):
    """What a share costs one rank: its step's seconds with the best of the micro-batches that it may run."""

    model: StepModel
    sizes: tuple[int, ...]  # samples of a pass

    @classmethod
    def at(cls, model: StepModel, micro: int) -> "ShareCost":
        """With a micro-batch that is set."""
        return cls(model, (max(micro, 1),))

    @classmethod
    def up_to(cls, model: StepModel, most: int, *, tries_all: bool = False) -> "ShareCost":
        """With any micro-batch that memory allows. Powers of two and what is midway between them are tried, or all:
        by those a step can be up to 2 % longer than by all."""
        if tries_all:
            return cls(model, tuple(range(1, max(most, 1) + 1)))
        powers = [2**power for power in range(most.bit_length())]
        sizes = {size for power in powers for size in (power, power + power // 2) if size < most} | {max(most, 1)}
        return cls(model, tuple(sorted(sizes)))

    def seconds(self, share: int) -> float:
        """The length of the rank's step; never less with more samples."""
        (curve, floor, slowdown), sizes = self
        best, least = math.inf, curve.least_per_sample(sizes[-1])
        for size, of_pass in curve.passes(sizes):
            passes, rest = divmod(share, size)
            if passes * of_pass + rest * least < best:
                best = min(best, passes * of_pass + curve.seconds(rest))
        return slowdown * best + floor

    def most(self, level: float) -> int:
        """The largest share whose step takes no longer than `level` seconds; 0 if there is none."""
        (curve, floor, slowdown), sizes = self
        budget = (level - floor) / slowdown * (1 + ROUNDING)
        if budget <= 0:
            return 0
        best, least = 0, curve.least_per_sample(sizes[-1])
        for size, of_pass in curve.passes(sizes):
            passes = int(budget / of_pass)
            left = budget - passes * of_pass
            if passes * size + left / least >= best + 1:
                best = max(best, passes * size + min(curve.most(left), size - 1))
                if (best + 1) * least > budget:
                    break
        return best

    def micro(self, share: int) -> int:
        """The micro-batch that runs a share soonest: what is set, or the best that memory allows."""
        return self.sizes[0] if len(self.sizes) == 1 else self.model.best_micro(share, self.sizes[-1])

    @property
    def rated(self) -> tuple[float, float]:
        """Samples per second that no share goes above, and the seconds that none changes."""
        return self.model.rated(self.sizes[-1])


def group_costs(
    total: int, models: Mapping[int, StepModel], micros: Mapping[int, int], most: Mapping[int, int]
) -> dict[int, ShareCost]:
    """What shares of a batch of `total` cost the ranks of `micros`, of which there must be a model each: with any
    micro-batch up to that in `most`, if it has one and the rank's model knows several, else with that in `micros`."""
    free = {rank: min(most[rank], total) for rank in micros if rank in most and not models[rank].is_linear}
    tries_all = sum(free.values()) <= MOST_SIZES
    return {
        rank: ShareCost.up_to(models[rank], free[rank], tries_all=tries_all)
        if rank in free
        else ShareCost.at(models[rank], micro)
        for rank, micro in micros.items()
    }


def split(total: int, costs: Mapping[int, ShareCost], field: str = "value") -> dict[int, int]:
    """The shares, each at least one, whose slowest rank is the least slow.

    A level of seconds is raised until the ranks can almost do the batch within it. What is left goes to the rank
    that is done first with it, ties to the lower rank. Each such step is the best there is, because a rank's seconds
    grow with its share. Raises InvalidInputError naming `field` if there are more ranks than samples.
    """
    check_enough(total, len(costs), field)
    counts = _filled(total, costs)
    left = total - sum(counts.values())
    queue = [(costs[rank].seconds(count + 1), rank) for rank, count in counts.items()]
    heapq.heapify(queue)
    while left:
        seconds, rank = queue[0]
        more = min(max(costs[rank].most(seconds) - counts[rank], 1), left)
        counts[rank] += more
        left -= more
        heapq.heapreplace(queue, (costs[rank].seconds(counts[rank] + 1), rank))
    return counts


def _filled(total: int, costs: Mapping[int, ShareCost]) -> dict[int, int]:
    """Shares that are done by the same time, together at most `total` and nearly so."""
    rated = [cost.rated for cost in costs.values()]
    low, rates = lower_bound(total, rated), sum([rate for rate, _ in rated])
    high, counts = math.inf, _within(low, costs)
    level = low
    for _ in range(MOST_ROUNDS):
        missing = total - sum(counts.values())
        if missing <= len(costs):
            break
        level = min(level + missing / rates, (level + high) / 2)
        tried = _within(level, costs)
        if sum(tried.values()) > total:
            high, level = level, low
        else:
            low, counts = level, tried
    return counts


def _within(level: float, costs: Mapping[int, ShareCost]) -> dict[int, int]:
    return {rank: max(1, cost.most(level)) for rank, cost in sorted(costs.items())}


def slowest(shares: Mapping[int, int], costs: Mapping[int, ShareCost]) -> float:
    """Seconds of a step with these shares: the slowest rank's."""
    return max(costs[rank].seconds(share) for rank, share in shares.items())


def lower_bound(total: int, rated: Sequence[tuple[float, float]]) -> float:
    """Seconds that no split goes below: of samples that can be divided at will, each at its rank's highest rate, those
    ranks aside that would have less than one. `rated`: what `StepModel.rated` says of each rank."""
    rich, left = rated, total
    while True:
        level = (left + sum([rate * floor for rate, floor in rich])) / sum([rate for rate, _ in rich])
        staying = [one for one in rich if one[0] * (level - one[1]) >= 1]
        if not staying or len(staying) == len(rich):
            return level
        left -= len(rich) - len(staying)
        rich = staying
