"""Whole samples of a global batch by weights, or by how fast the ranks are: exact, and the same wherever asked."""

import heapq
import math
import statistics
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Phases

Weights = Mapping[int, float] | Mapping[int, Fraction]


def spread(total: int, weights: Weights) -> dict[int, int]:
    """`total` samples over ranks in proportion to `weights`, summing exactly; a rank may get none. Largest remainders
    (Hamilton's method) in exact arithmetic, ties to the lower rank: what divides without a rest is dealt just so.
    Raises InvalidInputError if the weights don't allow a proportion."""
    if not weights or not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
        raise InvalidInputError("value", "shares need at least one positive weight")
    exact = {rank: Fraction(weights[rank]) for rank in sorted(weights)}
    weight_sum = sum(exact.values())
    quotas = {rank: total * weight / weight_sum for rank, weight in exact.items()}
    counts = {rank: math.floor(quota) for rank, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(counts.values())]:
        counts[rank] += 1
    return counts


def apportion(total: int, weights: Weights, field: str = "value") -> dict[int, int]:
    """As `spread`, but every rank gets at least one: those whose proportion is less get one, the others the rest.
    Raises InvalidInputError naming `field` if there are more ranks than samples, or the weights don't allow a
    proportion."""
    _check_enough(total, len(weights), field)
    counts = spread(total, weights)
    poor = [rank for rank, count in counts.items() if not count]
    if not poor:
        return counts
    rest = {rank: Fraction(weight) for rank, weight in weights.items() if rank not in poor}
    return dict(sorted({**dict.fromkeys(poor, 1), **apportion(total - len(poor), rest, field)}.items()))


def _check_enough(total: int, ranks: int, field: str) -> None:
    if total < ranks:
        raise InvalidInputError(field, f"{total} samples are too few for {ranks} ranks; each needs at least one")


# ---------------------------------------------------------------- by speed


class Speed(NamedTuple):
    """What a rank would do alone, and what a step takes it whatever its share."""

    samples_per_second: float  # of data, forward and backward
    floor_seconds: float = 0.0  # transfer, optimizer and plan

    def seconds(self, share: int) -> float:
        """The length of a step that no one else makes longer."""
        return share / self.samples_per_second + self.floor_seconds


class Timing(NamedTuple):
    """One rank's part of one step."""

    samples: int
    phases: Phases


def speeds(timings: Mapping[int, Sequence[Timing]]) -> dict[int, Speed]:
    """Ranks' speeds by the medians of their last steps; none for a rank that has computed nothing.

    In `sync` the faster ranks also wait for the slowest, and so they may for the plan: what the least waiting rank
    spends there counts for all of them.
    """
    known = {rank: [*rows] for rank, rows in timings.items() if rows}
    if not known:
        return {}
    transfer, plan = (
        min(statistics.median(getattr(row.phases, name) for row in rows) for rows in known.values())
        for name in ("sync", "wait")
    )
    rates = {
        rank: [row.samples / row.phases.busy for row in rows if row.phases.busy > 0 and row.samples]
        for rank, rows in known.items()
    }
    return {
        rank: Speed(
            statistics.median(found), transfer + plan + statistics.median(row.phases.optimizer for row in known[rank])
        )
        for rank, found in rates.items()
        if found
    }


def quickest(total: int, by_rank: Mapping[int, Speed], field: str = "value") -> dict[int, int]:
    """The shares, each at least one, whose slowest rank is the least slow.

    All are filled to the level that a divisible batch would have, and what is left goes one by one to whoever is done
    first with it, ties to the lower rank; each such step is the best there is, for a rank's seconds grow with its
    share. Raises InvalidInputError naming `field` if there are more ranks than samples, or a rank has no speed.
    """
    _check_enough(total, len(by_rank), field)
    if not all(0 < speed.samples_per_second < math.inf for speed in by_rank.values()):
        raise InvalidInputError(field, "every rank needs a measured rate above 0")
    level = fluid_seconds(total, by_rank)
    counts = {
        rank: max(1, math.floor(speed.samples_per_second * (level - speed.floor_seconds)))
        for rank, speed in sorted(by_rank.items())
    }
    queue = [(by_rank[rank].seconds(count + 1), rank) for rank, count in counts.items()]
    heapq.heapify(queue)
    for _ in range(total - sum(counts.values())):
        _, rank = queue[0]
        counts[rank] += 1
        heapq.heapreplace(queue, (by_rank[rank].seconds(counts[rank] + 1), rank))
    return counts


def fluid_seconds(total: int, by_rank: Mapping[int, Speed]) -> float:
    """When all would be done with `total` samples that can be divided at will, those with less than one aside: no
    split is shorter."""
    rich, left = dict(by_rank), total
    while True:
        rates = sum(speed.samples_per_second for speed in rich.values())
        held_back = sum(speed.samples_per_second * speed.floor_seconds for speed in rich.values())
        level = (left + held_back) / rates
        poor = [rank for rank, speed in rich.items() if speed.samples_per_second * (level - speed.floor_seconds) < 1]
        if not poor or len(poor) == len(rich):
            return level
        left -= len(poor)
        rich = {rank: speed for rank, speed in rich.items() if rank not in poor}
