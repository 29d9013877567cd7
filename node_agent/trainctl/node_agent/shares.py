"""Integer arithmetic of the global batch: who takes how many samples, which positions, and the divisor D."""

import math
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Range


def spread(total: int, weights: Mapping[int, float] | Mapping[int, Fraction]) -> dict[int, int]:
    """`total` samples over ranks in proportion to `weights`, summing exactly; a rank may get none.

    Largest remainders (Hamilton's method) in exact arithmetic, ties to the lower rank: what divides without a rest is
    dealt just so. Raises InvalidInputError if the weights don't allow a proportion.
    """
    if not weights or not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
        raise InvalidInputError("value", "shares need a positive weight")
    exact = {rank: Fraction(weights[rank]) for rank in sorted(weights)}
    weight_sum = sum(exact.values())
    quotas = {rank: total * weight / weight_sum for rank, weight in exact.items()}
    counts = {rank: math.floor(quota) for rank, quota in quotas.items()}
    by_remainder = sorted(quotas, key=lambda rank: (counts[rank] - quotas[rank], rank))
    for rank in by_remainder[: total - sum(counts.values())]:
        counts[rank] += 1
    return counts


def apportion(
    total: int, weights: Mapping[int, float] | Mapping[int, Fraction], field: str = "value"
) -> dict[int, int]:
    """As `spread`, but every rank gets at least one: those whose proportion is less get one, the others the rest.

    Raises InvalidInputError naming `field` if there are more ranks than samples, or the weights don't allow a
    proportion.
    """
    if total < len(weights):
        raise InvalidInputError(
            field, f"{total} samples are fewer than the {len(weights)} ranks; each takes one or more"
        )
    counts = spread(total, weights)
    poor = [rank for rank, count in counts.items() if not count]
    if not poor:
        return counts
    rest = {rank: Fraction(weight) for rank, weight in weights.items() if rank not in poor}
    return dict(sorted({**dict.fromkeys(poor, 1), **apportion(total - len(poor), rest, field)}.items()))


def first_shares(total: int, wanted: Mapping[int, int | None]) -> dict[int, int]:
    """Shares of a run's start: those the run file gives, the rest dealt evenly. Raises InvalidInputError."""
    fixed = {rank: share for rank, share in wanted.items() if share is not None}
    free = [rank for rank, share in wanted.items() if share is None]
    left = total - sum(fixed.values())
    if left < len(free) or (left and not free):
        wanted_sum = f"shares sum to {total - left} and {len(free)} more ranks take one or more"
        raise InvalidInputError("nodes", f"{wanted_sum}; batch.global is {total}")
    if not free:
        return dict(sorted(fixed.items()))
    return dict(sorted({**fixed, **apportion(left, dict.fromkeys(free, 1.0))}.items()))


def deal(start: int, shares: Mapping[int, int]) -> dict[int, tuple[Range, ...]]:
    """Positions from `start` on, to the ranks in ascending order."""
    dealt: dict[int, tuple[Range, ...]] = {}
    for rank in sorted(shares):
        dealt[rank] = (Range(start, shares[rank]),) if shares[rank] else ()
        start += shares[rank]
    return dealt


def subtract(ranges: Iterable[Range], held: Iterable[Range]) -> list[Range]:
    """The positions of `ranges` that are in none of `held`, ascending, as few ranges as possible."""
    cuts = sorted(held)
    left: list[Range] = []
    for whole in sorted(ranges):
        at = whole.start
        for cut in cuts:
            if cut.stop <= at or cut.start >= whole.stop:
                continue
            if cut.start > at:
                left.append(Range(at, cut.start - at))
            at = max(at, cut.stop)
        if at < whole.stop:
            left.append(Range(at, whole.stop - at))
    return merge(left)


def merge(ranges: Iterable[Range]) -> list[Range]:
    """The same positions as ascending ranges that don't touch. The input must not overlap."""
    merged: list[Range] = []
    for piece in sorted(ranges):
        if merged and merged[-1].stop == piece.start:
            merged[-1] = Range(merged[-1].start, merged[-1].count + piece.count)
        else:
            merged.append(piece)
    return merged


def cut(ranges: Sequence[Range], counts: Mapping[int, int]) -> dict[int, tuple[Range, ...]]:
    """`ranges` dealt in order to ranks, `counts[rank]` positions each; the counts sum to the positions there are."""
    queue = list(ranges)
    dealt: dict[int, tuple[Range, ...]] = {}
    for rank in sorted(counts):
        wanted, mine = counts[rank], []
        while wanted:
            head = queue.pop(0)
            taken = min(wanted, head.count)
            mine.append(Range(head.start, taken))
            if taken < head.count:
                queue.insert(0, Range(head.start + taken, head.count - taken))
            wanted -= taken
        dealt[rank] = tuple(mine)
    return dealt


def divisor(global_batch: int, mean_weight: float) -> float:
    """D: the power of two nearest (in ratio) to the expected global weight, so that scaling by it is exact."""
    return 2.0 ** round(math.log2(max(1.0, global_batch * mean_weight)))
