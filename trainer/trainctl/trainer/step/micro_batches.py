"""A rank's work of one plan, cut into micro-batches that memory suffices for."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import PlanKind, RankWork, StepPlan
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.permutation import Indices, positions_of

Lengths = Callable[[Indices], Indices]
"""Gives the length of the sample at each position."""


@dataclass(frozen=True)
class PlanSums:
    """Sums over a plan's micro-batches, and what memory allowed."""

    micro_batch: int = 0  # in use at the end: never more than there were samples
    replays: int = 0
    loss_sum: float = 0.0
    weight: float = 0.0
    samples: int = 0
    tokens: int = 0  # of all ranks
    own_tokens: int = 0


@dataclass(frozen=True)
class _Fit:
    """The micro-batch that fitted where a version of the plan asked for another."""

    plan_version: int
    asked: int
    fits: int


class MicroBatches:
    """Remembers from plan to plan which micro-batch fitted. One has at most `tokens` with its padding, unless it is a
    single sample; 0: no limit."""

    def __init__(self, tokens: int = 0) -> None:
        self._tokens = tokens
        self._fits: dict[bool, _Fit] = {}  # by whether there is a backward: evaluation needs other memory

    def queue(self, plan: StepPlan, work: RankWork, lengths: Lengths | None = None) -> "MicroBatchQueue":
        """Return the micro-batches of a rank's part of a plan. If `lengths` are given, the longest samples come first:
        micro-batches of like lengths have little padding, and a lack of memory shows at once."""
        return MicroBatchQueue(self, plan, work, lengths)

    def allowed(self, plan: StepPlan, work: RankWork) -> int:
        """Return what fitted when this version of the plan asked for the same before, else what is asked for."""
        fit = self._fits.get(_has_backward(plan.kind))
        is_known = fit is not None and (fit.plan_version, fit.asked) == (plan.plan_version, work.micro_batch)
        return fit.fits if fit is not None and is_known else work.micro_batch

    def remember(self, plan: StepPlan, work: RankWork, fits: int) -> None:
        """Keep a smaller size until another version of the plan."""
        self._fits[_has_backward(plan.kind)] = _Fit(plan.plan_version, work.micro_batch, fits)

    def pieces(self, positions: Indices, widths: Indices, size: int) -> Iterator[Indices]:
        """Yield positions in micro-batches of at most `size` samples; `widths` are their lengths."""
        done = 0
        while done < len(positions):
            width = int(widths[done])
            most = min(size, max(1, self._tokens // width)) if self._tokens and width else size
            yield positions[done : done + most]
            done += most


class MicroBatchQueue:
    """A plan's micro-batches that are still to be done. One that memory doesn't suffice for is halved."""

    def __init__(self, micro_batches: MicroBatches, plan: StepPlan, work: RankWork, lengths: Lengths | None) -> None:
        self._micro_batches, self._plan, self._work = micro_batches, plan, work
        self._positions, self._widths = _longest_first(positions_of(work.ranges), lengths)
        self._size = micro_batches.allowed(plan, work)
        self._done = self._replays = 0
        self._pieces = deque(micro_batches.pieces(self._positions, self._widths, self._size))

    def __bool__(self) -> bool:
        """Return whether there is a micro-batch to do."""
        return bool(self._pieces)

    @property
    def next(self) -> Indices:
        """The positions of the micro-batch to do now."""
        return self._pieces[0]

    def following(self) -> Iterator[Indices]:
        """Return the micro-batches after that one, as long as memory suffices."""
        return islice(self._pieces, 1, None)

    def done(self) -> None:
        """Go on to the next micro-batch."""
        self._done += len(self._pieces.popleft())

    def halve(self, error: DeviceMemoryError) -> None:
        """Do the micro-batch again in halves. Raises TrainctlError if it has one sample."""
        if len(self.next) == 1:
            raise TrainctlError(f"out of memory with a micro-batch of one sample: {error}") from None
        self._size = len(self.next) // 2
        self._replays += 1
        self._micro_batches.remember(self._plan, self._work, self._size)
        rest = self._positions[self._done :], self._widths[self._done :]
        self._pieces = deque(self._micro_batches.pieces(*rest, self._size))

    def sums(
        self, *, loss_sum: float = 0.0, weight: float = 0.0, samples: int = 0, tokens: int = 0, own_tokens: int = 0
    ) -> PlanSums:
        """Return the plan's sums, with the micro-batch in use at the end and how often it was halved."""
        micro_batch = min(self._size, len(self._positions))
        return PlanSums(micro_batch, self._replays, loss_sum, weight, samples, tokens, own_tokens)

    def of_next_step(self, lengths: Lengths) -> Iterator[Indices]:
        """Return the micro-batches of the step after the plan, as long as nothing changes."""
        positions = positions_of(self._work.ranges) + self._plan.global_batch
        return self._micro_batches.pieces(*_longest_first(positions, lengths), self._size)


def _longest_first(positions: Indices, lengths: Lengths | None) -> tuple[Indices, Indices]:
    """Return positions and their lengths; the order of equals stays."""
    widths = np.zeros(len(positions), np.int64) if lengths is None else lengths(positions)
    order = np.argsort(-widths, kind="stable")
    return positions[order], widths[order]


def _has_backward(kind: PlanKind) -> bool:
    return kind in ("train", "measure")
