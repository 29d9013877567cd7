"""Shares of the global batch, and what other shares or micro-batches would make of a step and its memory: pure.

A node takes the seconds of its passes, and a floor besides (transfer, optimizer, plan); the group takes as long as its
slowest node. A share below the micro-batch that is set is run in one pass. Seconds of a pass lie on a line between two
micro-batches that were measured.

Memory at a micro-batch that was in use is the peak of its steps. Beyond the largest it grows with the samples of a pass
by what that peak has over what is held after the step; where those don't differ, no more is known than that it grows at
most in proportion.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainctl.protocol.batch.split import group_costs, split
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.events import SharesChanged
from trainctl.tui.state.rank_rows import paces
from trainctl.tui.state.run_events import took_effect
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import gigabytes


@dataclass(frozen=True)
class Seat:
    """One live node: its share in the plan, and what is measured of it; what isn't known is None."""

    node: str
    share: int
    micro_batch: int  # that is set; a smaller share is run in one pass
    model: StepModel | None = None
    memory_bytes: float | None = None  # held after its last step
    memory_cap_bytes: float | None = None
    peak_bytes: float | None = None  # of its last step
    rank: int = 0
    peaks: Mapping[int, float] = field(default_factory=dict)  # by the micro-batch that the step was of
    most_micro: int | None = None  # largest micro-batch that may be chosen with the share; None: it isn't chosen

    def seconds(self, share: int) -> float | None:
        """Return the step's length this node would ask for with `share` samples."""
        return self.model.seconds(share, self.micro_batch) if self.model is not None else None

    @property
    def samples_per_second(self) -> float | None:
        """Return what it would do alone, with its micro-batch."""
        return self.model.samples_per_second(min(self.micro_batch, self.share)) if self.model is not None else None

    @property
    def micro_in_force(self) -> int:
        """Return samples of its passes."""
        return min(self.micro_batch, self.share)


def seats_of(state: ViewState, back: str = "") -> tuple[Seat, ...]:
    """Return the run's live ranks that have a share, after them those of a node that comes `back`, and what their last
    steps measured."""
    out = [view for view in (state.run.ranks if state.run else ()) if view.node == back and view.is_held]
    views = (*(state.run.live_ranks if state.run else ()), *out)
    known = paces(state, views)
    made = []
    for view in views:
        if view.share is None:
            continue
        seen = state.ranks.get(view.rank)
        step = seen.value if seen else None
        tried = {micro: trial.peak_bytes for (rank, micro), trial in state.tried.items() if rank == view.rank}
        peaks = dict(tried)
        if step is not None and step.micro_batch is not None:
            peaks[step.micro_batch] = step.peak_or_held_bytes
        made.append(
            Seat(
                view.node,
                view.share,
                max(view.micro_set or view.micro_batch or 0, 1),
                known.get(view.rank),
                step.memory_bytes if step else None,
                step.memory_cap_bytes if step else None,
                step.peak_or_held_bytes if step else None,
                view.rank,
                {micro: peak for micro, peak in peaks.items() if peak is not None},
                view.micro_most,
            )
        )
    return tuple(made)


def group_seconds(seats: Sequence[Seat], shares: Sequence[int]) -> float | None:
    """Return the predicted step: its slowest node's. None unless every node has been measured."""
    found = [seat.seconds(share) for seat, share in zip(seats, shares, strict=True)]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) if known and len(known) == len(found) else None


@dataclass(frozen=True)
class Fastest:
    """The split with the shortest step."""

    shares: tuple[int, ...]
    micros: tuple[int, ...]  # that are set with them: as they were, or chosen with the share


def fastest(seats: Sequence[Seat]) -> Fastest | None:
    """Return what `rebalance auto=true` makes; None unless every node has been measured. Raises ValueError if there are
    more nodes than samples."""
    models = {index: seat.model for index, seat in enumerate(seats) if seat.model is not None}
    if len(models) < len(seats):
        return None
    total, micros = sum(seat.share for seat in seats), {index: seat.micro_batch for index, seat in enumerate(seats)}
    most = {index: seat.most_micro for index, seat in enumerate(seats) if seat.most_micro is not None}
    costs = group_costs(total, models, micros, most)
    counts = _in_words(lambda: split(total, costs, "auto"))
    return Fastest(counts, tuple(cost.micro(share) for cost, share in zip(costs.values(), counts, strict=True)))


def with_micros(seats: Sequence[Seat], micros: Sequence[int]) -> tuple[Seat, ...]:
    """Return the nodes with other micro-batches."""
    return tuple(replace(seat, micro_batch=micro) for seat, micro in zip(seats, micros, strict=True))


def _shares(seats: Sequence[Seat]) -> dict[int, int]:
    return {index: seat.share for index, seat in enumerate(seats)}


def _in_words(made: Callable[[], Mapping[int, int]]) -> tuple[int, ...]:
    try:
        return tuple(made().values())
    except InvalidInputError as error:
        raise ValueError(error.problem) from None


def former(state: ViewState, seats: Sequence[Seat]) -> tuple[int, ...]:
    """Return the shares before the last rebalance that was applied, if they are of these nodes and this global
    batch."""
    done = (event for event in reversed(state.run_events) if event.verb == "rebalance" and event.outcome == "applied")
    event = next((event for event in done if took_effect(event)), None)
    return former_of(event.data.before, seats) if event and isinstance(event.data, SharesChanged) else ()


def former_of(shares: Mapping[str, int], seats: Sequence[Seat]) -> tuple[int, ...]:
    """Return these shares in the order of the seats; none unless they are of exactly these nodes and of the same
    sum."""
    found = {node: count for node, count in shares.items() if count}
    if set(found) != {seat.node for seat in seats} or sum(found.values()) != sum(seat.share for seat in seats):
        return ()
    return tuple(found[seat.node] for seat in seats)


_LEAST_GROWTH = 0.02
"""A peak over what is held by less than this part says nothing about samples."""


@dataclass(frozen=True)
class Memory:
    """A node's predicted peak, in bytes; `at_most` where it is a bound, and not an estimate."""

    bytes: float
    cap_bytes: float | None
    at_most: bool

    @property
    def over(self) -> bool:
        """Return whether it is more than there is."""
        return self.cap_bytes is not None and self.bytes > self.cap_bytes

    def __str__(self) -> str:
        bound = "at most " if self.at_most else ""
        cap = f" of {gigabytes(self.cap_bytes)}" if self.cap_bytes is not None else ""
        return f"{bound}{gigabytes(self.bytes)}{cap} GB"


def memory_at(seat: Seat, share: int, micro: int) -> Memory | None:
    """Return the peak with `share` samples in passes of `micro`; None where none was measured."""
    wanted, cap = min(share, micro), seat.memory_cap_bytes
    enough = min((size for size in seat.peaks if size >= wanted), default=None)
    if enough is not None:
        return Memory(seat.peaks[enough], cap, at_most=wanted < enough)
    if not seat.peaks or seat.memory_bytes is None:
        return None
    largest = max(seat.peaks)
    peak, held, times = seat.peaks[largest], seat.memory_bytes, wanted / max(largest, 1)
    samples = peak - held
    if samples < _LEAST_GROWTH * peak:
        return Memory(peak * times, cap, at_most=True)
    return Memory(held + samples * times, cap, at_most=False)
