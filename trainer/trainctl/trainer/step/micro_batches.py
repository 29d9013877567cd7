"""A rank's work of one plan, cut into micro-batches that memory suffices for."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import PlanKind, RankWork, StepPlan
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.permutation import Indices, positions_of

Lengths = Callable[[Indices], Indices]
"""Of each position, the length of its sample."""


@dataclass
class PlanSums:
    """What a plan's micro-batches came to, and what memory allowed."""

    micro_batch: int = 0  # in use at the end: never more than there were samples
    replays: int = 0
    loss_sum: float = 0.0
    weight: float = 0.0
    samples: int = 0
    tokens: int = 0  # of all ranks
    own_tokens: int = 0


@dataclass(frozen=True)
class _Fit:
    """What memory allowed of a micro-batch that a version of the plan asks for."""

    plan_version: int
    asked: int
    fits: int


class MicroBatches:
    """Remembers from plan to plan which micro-batch fitted. One has at most `tokens` with its padding, unless it is a
    single sample; 0: no limit."""

    def __init__(self, tokens: int = 0) -> None:
        self._tokens = tokens
        self._fits: dict[bool, _Fit] = {}  # by whether there is a backward: evaluation needs other memory

    def each(
        self, plan: StepPlan, work: RankWork, sums: PlanSums, run: Callable[[Indices, Iterator[Indices]], None],
        lengths: Lengths | None = None,
    ) -> None:  # fmt: skip
        """`run` over the work in micro-batches; it is given those that follow too. If `lengths` are given, the longest
        samples come first: micro-batches of like lengths have little padding, and a lack of memory shows at once. A
        micro-batch that memory didn't suffice for is run again in halves, and the smaller size is kept until another
        version of the plan. Raises TrainctlError if one sample is too much."""
        positions, widths = _longest_first(positions_of(work.ranges), lengths)
        size = self._allowed(plan, work)
        done = 0
        while done < len(positions):
            following = self._pieces(positions[done:], widths[done:], size)
            piece = next(following)
            try:
                run(piece, following)
                done += len(piece)
            except DeviceMemoryError as error:
                if len(piece) == 1:
                    raise TrainctlError(f"out of memory with a micro-batch of one sample: {error}") from None
                size = len(piece) // 2
                sums.replays += 1
                self._fits[_has_backward(plan.kind)] = _Fit(plan.plan_version, work.micro_batch, size)
        sums.micro_batch = min(size, len(positions))

    def of_next_step(self, plan: StepPlan, work: RankWork, lengths: Lengths) -> Iterator[Indices]:
        """The micro-batches of the step after `plan` as long as nothing changes."""
        positions = positions_of(work.ranges) + plan.global_batch
        return self._pieces(*_longest_first(positions, lengths), self._allowed(plan, work))

    def _pieces(self, positions: Indices, widths: Indices, size: int) -> Iterator[Indices]:
        done = 0
        while done < len(positions):
            piece = positions[done : done + self._within(size, int(widths[done]))]
            yield piece
            done += len(piece)

    def _within(self, size: int, width: int) -> int:
        """How many of `size` samples, padded to `width`, a micro-batch takes."""
        return min(size, max(1, self._tokens // width)) if self._tokens and width else size

    def _allowed(self, plan: StepPlan, work: RankWork) -> int:
        """What fitted when this version of the plan asked for the same before, else what is asked for."""
        found = self._fits.get(_has_backward(plan.kind))
        known = found is not None and (found.plan_version, found.asked) == (plan.plan_version, work.micro_batch)
        return found.fits if found is not None and known else work.micro_batch


def _longest_first(positions: Indices, lengths: Lengths | None) -> tuple[Indices, Indices]:
    """Positions and their lengths; the order of equals stays."""
    widths = np.zeros(len(positions), np.int64) if lengths is None else lengths(positions)
    order = np.argsort(-widths, kind="stable")
    return positions[order], widths[order]


def _has_backward(kind: PlanKind) -> bool:
    return kind in ("train", "measure")
