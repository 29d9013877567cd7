"""What a run costs: the time that each of its nodes took part, by the node's price. Pure.

A node takes part from when the run starts, or one of its ranks joins, until its last rank is drained or lost or the run
ends. Pauses count, for a rented machine costs money while it waits.
"""

from collections.abc import Collection

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.config.cluster_file import Prices

HOUR_SECONDS = 3600.0


class NodeTime(msgspec.Struct, frozen=True):
    """For how long a node has taken part in a run."""

    node: str
    seconds: float = 0.0  # up to `since_at`, or in all if it takes no part now
    since_at: float | None = None  # from when on it takes part, Unix seconds; None: it takes no part now

    def until(self, at: float) -> float:
        """Its seconds up to `at`, Unix seconds. A clock that went back takes none away."""
        return self.seconds + (max(0.0, at - self.since_at) if self.since_at is not None else 0.0)


Times = tuple[NodeTime, ...]


class CostFigures(msgspec.Struct, frozen=True):
    """What is said of a run's cost, all in its currency; None: unknown."""

    currency: str
    spent: float
    per_hour: float
    to_end: float | None  # from now to the last step
    per_1000: float | None  # per 1,000 samples or pairs, of all that the run has cost
    unpriced: tuple[str, ...]  # nodes whose cost is missing from all of these


def counted(times: Times, taking_part: Collection[str], at: float) -> Times:
    """The nodes' times once those in `taking_part`, and no others, take part from `at` (Unix seconds) on."""
    known = [_turned(time, time.node in taking_part, at) for time in times]
    new = sorted(set(taking_part) - {time.node for time in times})
    return (*known, *(NodeTime(node, 0.0, at) for node in new))


def run_cost(times: Times, prices: Prices, at: float) -> m.RunCost | None:
    """The cost up to `at`, Unix seconds; None if none of the nodes has a price."""
    priced = [(time, prices.per_hour[time.node]) for time in times if time.node in prices.per_hour]
    if not priced:
        return None
    return m.RunCost(
        currency=prices.currency, spent=sum(price * time.until(at) / HOUR_SECONDS for time, price in priced), at=at,
        per_hour=sum(price for time, price in priced if time.since_at is not None),
        unpriced=tuple(time.node for time in times if time.node not in prices.per_hour),
    )  # fmt: skip


def spent_by(cost: m.RunCost, at: float) -> float:
    """What the run has cost by `at`, Unix seconds; never less than is known to be spent."""
    return cost.spent + cost.per_hour * max(0.0, at - cost.at) / HOUR_SECONDS


def figures(cost: m.RunCost, at: float, seconds_left: float | None, samples: int | None) -> CostFigures:
    """At `at`, Unix seconds. `seconds_left`: until the last step; `samples`: trained on so far. None: unknown."""
    spent = spent_by(cost, at)
    to_end = cost.per_hour * seconds_left / HOUR_SECONDS if seconds_left is not None else None
    return CostFigures(
        currency=cost.currency, spent=spent, per_hour=cost.per_hour, to_end=to_end,
        per_1000=1000 * spent / samples if samples else None, unpriced=cost.unpriced,
    )  # fmt: skip


def ended(cost: m.RunCost, at: float) -> m.RunCost:
    """Of a run that ended at `at`, Unix seconds, though its lead's agent could not say so any more."""
    return msgspec.structs.replace(cost, spent=spent_by(cost, at), at=max(at, cost.at), per_hour=0.0)


def _turned(time: NodeTime, takes_part: bool, at: float) -> NodeTime:
    if takes_part == (time.since_at is not None):
        return time
    return NodeTime(time.node, time.until(at), at if takes_part else None)
