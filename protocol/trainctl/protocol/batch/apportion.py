"""Whole samples of a global batch by weights: exact, and the same wherever asked."""

import math
from collections.abc import Mapping
from fractions import Fraction

from trainctl.protocol.errors import InvalidInputError

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
    check_enough(total, len(weights), field)
    counts = spread(total, weights)
    poor = [rank for rank, count in counts.items() if not count]
    if not poor:
        return counts
    rest = {rank: Fraction(weight) for rank, weight in weights.items() if rank not in poor}
    return dict(sorted({**dict.fromkeys(poor, 1), **apportion(total - len(poor), rest, field)}.items()))


def check_enough(total: int, ranks: int, field: str) -> None:
    """Raises InvalidInputError naming `field` if there are more ranks than samples."""
    if total < ranks:
        raise InvalidInputError(field, f"{total} samples are too few for {ranks} ranks; each needs at least one")
