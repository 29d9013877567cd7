"""Integer arithmetic of the global batch: a run's first shares, who takes which positions, and the divisor D."""

import math
from collections.abc import Iterable, Mapping, Sequence

from trainctl.protocol.batch.split import apportion
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Range


def first_shares(total: int, wanted: Mapping[int, int | None]) -> dict[int, int]:
    """Shares of a run's start: those the run file gives, the rest dealt evenly. Raises InvalidInputError."""
    fixed = {rank: share for rank, share in wanted.items() if share is not None}
    free = [rank for rank, share in wanted.items() if share is None]
    left = total - sum(fixed.values())
    if left < len(free) or (left and not free):
        wanted_sum = f"shares sum to {total - left} and {len(free)} more ranks need at least one sample each"
        raise InvalidInputError("nodes", f"{wanted_sum}; batch.global is {total}")
    if not free:
        return dict(sorted(fixed.items()))
    return dict(sorted({**fixed, **apportion(left, dict.fromkeys(free, 1.0))}.items()))


def deal(start: int, shares: Mapping[int, int]) -> dict[int, tuple[Range, ...]]:
    """Positions from `start` on, to the ranks in ascending order."""
    dealt: dict[int, tuple[Range, ...]] = {}
    for rank in sorted(shares):
        share = shares[rank]
        dealt[rank] = (Range(start, share),) if share else ()
        start += share
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
    """Return the positions as ascending ranges that don't touch. The input must not overlap."""
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
