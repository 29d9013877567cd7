"""Shares of the global batch and what they would do: predictions and the arithmetic of `rebalance`, pure.

A node takes its samples / its own samples per second, and a floor besides (transfer, optimizer, plan); the group takes
as long as its slowest node. Memory is what was measured: only a larger micro-batch makes it grow, and new shares never
make one larger.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainctl.tui.changes import took_effect
from trainctl.tui.model import ViewState
from trainctl.tui.pace import live_ranks, paces

_PAIR = re.compile(r"([a-z0-9][a-z0-9._-]*)=(\d+)")


@dataclass(frozen=True)
class Seat:
    """One live node: its share in the plan, and what is measured of it; what isn't known is None."""

    node: str
    share: int
    micro_batch: int
    samples_per_second: float | None = None  # of data, forward and backward alone
    floor_seconds: float | None = None  # what a step takes besides
    memory_bytes: int | None = None
    memory_cap_bytes: int | None = None

    def seconds(self, share: int) -> float | None:
        """The step's length this node would ask for with `share` samples."""
        if self.samples_per_second is None or self.floor_seconds is None:
            return None
        return share / self.samples_per_second + self.floor_seconds

    def frees_memory(self, share: int) -> bool:
        """Whether the share is so small that the micro-batch falls with it."""
        return min(share, self.micro_batch) < min(self.share, self.micro_batch)


def seats_of(state: ViewState, back: str = "") -> tuple[Seat, ...]:
    """The run's live ranks, and after them those of a node that comes `back`, with what their last steps measured."""
    out = [view for view in (state.run.ranks if state.run else ()) if view.node == back and view.state == "drained"]
    views = (*live_ranks(state.run), *out)
    known = paces(state, views)
    made = []
    for view in views:
        pace, seen = known.get(view.rank), state.ranks.get(view.rank)
        step = seen.value if seen else None
        made.append(
            Seat(
                view.node, view.share, max(view.micro_batch, 1),
                pace.samples_per_second if pace else None, pace.floor if pace else None,
                step.memory_bytes if step else None, step.memory_cap_bytes if step else None,
            )
        )  # fmt: skip
    return tuple(made)


def group_seconds(seats: Sequence[Seat], shares: Sequence[int]) -> float | None:
    """The predicted step: its slowest node's. None unless every node's speed is known."""
    found = [seat.seconds(share) for seat, share in zip(seats, shares, strict=True)]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) if known and len(known) == len(found) else None


def apportion(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`total` samples in proportion to `weights` by largest remainders (ties to the first); those left with none get 1.

    Weights that already sum to `total` come back as they are. `total` must be at least the number of weights; weights
    that are no proportion (none above 0) count as equal.
    """
    size = max((weight for weight in weights if math.isfinite(weight)), default=0.0)
    parts = [max(weight, 0.0) / size if math.isfinite(weight) else 1.0 for weight in weights] if size > 0 else []
    parts = parts or [1.0] * len(weights)
    exact = [total * part / sum(parts) for part in parts]
    counts = [math.floor(value + 1e-9) for value in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: (counts[index] - exact[index], index))
    for index in by_rest[: total - sum(counts)]:
        counts[index] += 1
    rich = [index for index, count in enumerate(counts) if count]
    if len(rich) < len(counts):
        left = apportion(total - (len(counts) - len(rich)), [parts[index] for index in rich])
        counts = [1] * len(counts)
        for index, count in zip(rich, left, strict=True):
            counts[index] = count
    return tuple(counts)


def resolve(seats: Sequence[Seat], wanted: Mapping[str, int | str]) -> tuple[int, ...]:
    """The shares that `rebalance` with these values means. Raises ValueError saying why there are none.

    Samples are given as they are; then percentages of the global batch, and what is left in the proportions it has, are
    dealt by largest remainders.
    """
    total, names = sum(seat.share for seat in seats), [seat.node for seat in seats]
    for node in wanted:
        if node not in names:
            raise ValueError(f"no node {node!r} that takes part; there are {', '.join(names)}")
    counts = {node: amount for node, amount in wanted.items() if isinstance(amount, int)}
    weights = {node: _part(node, amount) * total for node, amount in wanted.items() if isinstance(amount, str)}
    left = total - sum(counts.values()) - sum(weights.values())
    unnamed = {seat.node: seat.share for seat in seats if seat.node not in wanted}
    _check_rest(total, left, tuple(unnamed), exact=not weights)
    weights |= {node: left * share / sum(unnamed.values()) for node, share in unnamed.items()}
    rest = total - sum(counts.values())
    if rest < len(weights):
        raise ValueError(f"{rest} of {total} samples are left for {len(weights)} nodes; each takes one or more")
    dealt = counts | dict(zip(weights, apportion(rest, list(weights.values())), strict=True)) if weights else counts
    return tuple(dealt[name] for name in names)


def without(seats: Sequence[Seat], node: str) -> tuple[int, ...]:
    """The shares once `node` is drained: 0 for it, its samples to the others in proportion."""
    staying = [seat.share for seat in seats if seat.node != node]
    dealt = iter(apportion(sum(seat.share for seat in seats), staying))
    return tuple(0 if seat.node == node else next(dealt) for seat in seats)


def with_back(seats: Sequence[Seat], node: str) -> tuple[int, ...]:
    """The shares once `node`, drained, is admitted: its part by own rates if all are known, else an even one; the
    others keep their proportions of the rest."""
    rates = [seat.samples_per_second for seat in seats]
    known = [rate for rate in rates if rate]
    weights = known if len(known) == len(seats) else [1.0] * len(seats)
    total = sum(seat.share for seat in seats)
    rest = sum(weight for seat, weight in zip(seats, weights, strict=True) if seat.node != node)
    parts = [weight if seat.node == node else rest * seat.share / total
             for seat, weight in zip(seats, weights, strict=True)]  # fmt: skip
    return apportion(total, parts)


def _part(node: str, text: str) -> float:
    part = float(text.removesuffix("%")) / 100
    if not part:
        raise ValueError(f"{node} can't have {text}; drain takes it out of the group")
    return part


def _check_rest(total: int, left: float, unnamed: Sequence[str], *, exact: bool) -> None:
    """With every node named, samples must come to the global batch, and percentages to it within one sample."""
    given = f"{total - left:g} of {total} samples"
    if unnamed and left <= 0:
        raise ValueError(f"shares come to {given}, which leaves nothing for {', '.join(unnamed)}")
    if not unnamed and (left if exact else abs(left) >= 1):
        raise ValueError(f"shares come to {given}; with every node named they must sum to {total}")


def former(state: ViewState, seats: Sequence[Seat]) -> tuple[int, ...]:
    """The shares before the last rebalance that was applied, if they are of these nodes and this global batch."""
    done = (event for event in reversed(state.run_events) if event.verb == "rebalance" and event.outcome == "applied")
    event = next((event for event in done if took_effect(event)), None)
    return former_of(event.before or "", seats) if event is not None else ()


def former_of(text: str, seats: Sequence[Seat]) -> tuple[int, ...]:
    """Shares from `a=16 b=8`; none unless they are of exactly these nodes and of the same sum."""
    found = {node: int(count) for node, count in _PAIR.findall(text)}
    found = {node: count for node, count in found.items() if count}
    if set(found) != {seat.node for seat in seats} or sum(found.values()) != sum(seat.share for seat in seats):
        return ()
    return tuple(found[seat.node] for seat in seats)
