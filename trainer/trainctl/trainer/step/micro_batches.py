"""A rank's work of one plan, cut into micro-batches that memory suffices for."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import RankWork, StepPlan
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.permutation import Indices, positions_of

Lengths = Callable[[Indices], Indices]
"""Gives the length of the sample at each position."""


@dataclass(frozen=True)
class Limits:
    """The most that a micro-batch may have."""

    samples: int
    tokens: int  # with its padding, unless it is a single sample; 0: any number

    def samples_of(self, length: int) -> int:
        """Return the most samples of a length."""
        return min(self.samples, max(1, self.tokens // length)) if self.tokens and length else self.samples

    def cut(self, positions: Indices, lengths: Indices) -> Iterator[Indices]:
        """Yield positions in micro-batches; `lengths` are those of their samples."""
        done = 0
        while done < len(positions):
            most = self.samples_of(int(lengths[done]))
            yield positions[done : done + most]
            done += most

    def halved(self, samples: int, length: int) -> "Limits":
        """Return limits for memory in which so many samples of a length have no room. Where tokens limited them, there
        may be as many shorter ones as before."""
        if self.samples_of(length) < self.samples:
            return replace(self, tokens=samples // 2 * length)
        return replace(self, samples=samples // 2)


class FittingLimits:
    """Remembers from plan to plan what fitted where a version of the plan asked for more."""

    def __init__(self, tokens: int = 0) -> None:
        """`tokens`: in a micro-batch with its padding; 0: any number."""
        self._tokens = tokens
        self._fitting: dict[bool, tuple[tuple[int, int], Limits]] = {}

    def of(self, plan: StepPlan, work: RankWork) -> Limits:
        """Return what fitted when this version of the plan asked for the same before, else what is asked for."""
        asked, limits = self._fitting.get(_has_backward(plan), (None, None))
        if limits is not None and asked == (plan.plan_version, work.micro_batch):
            return limits
        return Limits(work.micro_batch, self._tokens)

    def remember(self, plan: StepPlan, work: RankWork, limits: Limits) -> None:
        """Keep lower limits until another version of the plan."""
        self._fitting[_has_backward(plan)] = (plan.plan_version, work.micro_batch), limits


class MicroBatchQueue:
    """A plan's micro-batches: `pieces` has the positions of those that are still to be done. One that memory doesn't
    suffice for is halved. The longest samples come first: micro-batches of like lengths have little padding, and a lack
    of memory shows at once."""

    def __init__(self, fitting: FittingLimits, plan: StepPlan, work: RankWork, lengths: Lengths) -> None:
        self._fitting, self._plan, self._work = fitting, plan, work
        self._positions, self._lengths = longest_first(positions_of(work.ranges), lengths)
        self._limits = fitting.of(plan, work)
        self._done = self.replays = 0
        self.pieces = deque(self._limits.cut(self._positions, self._lengths))

    @property
    def micro_batch(self) -> int:
        """The most samples of a micro-batch: never more than there were."""
        return min(self._limits.samples, len(self._positions))

    def done(self) -> None:
        """Go on to the next micro-batch."""
        self._done += len(self.pieces.popleft())

    def halve(self, error: DeviceMemoryError) -> None:
        """Do the micro-batch again in halves. Raises TrainctlError if it has one sample."""
        if len(self.pieces[0]) == 1:
            raise TrainctlError(f"out of memory with a micro-batch of one sample: {error}") from None
        self._limits = self._limits.halved(len(self.pieces[0]), int(self._lengths[self._done]))
        self.replays += 1
        self._fitting.remember(self._plan, self._work, self._limits)
        self.pieces = deque(self._limits.cut(self._positions[self._done :], self._lengths[self._done :]))

    def of_next_step(self, lengths: Lengths) -> Iterator[Indices]:
        """Return the micro-batches of the step after the plan, as long as nothing changes."""
        positions = positions_of(self._work.ranges) + self._plan.global_batch
        return self._limits.cut(*longest_first(positions, lengths))


def longest_first(positions: Indices, lengths: Lengths) -> tuple[Indices, Indices]:
    """Return positions and the lengths of their samples; the order of equals stays."""
    each = lengths(positions)
    order = np.argsort(-each, kind="stable")
    return positions[order], each[order]


def _has_backward(plan: StepPlan) -> bool:
    """Return whether a plan needs memory for a backward pass: an evaluation's limits say nothing about training."""
    return plan.kind in ("train", "measure")
