"""The steps that a rank has committed and the part of a batch that it holds, shared by the threads that compute and
answer.

A fence ends a generation (`try_fence`), and what a rank does for it ends with AbandonedError. It interrupts the wait
for a sum, joining a group and copies of state between ranks, for it kills the reducers (control/orders.py:fence). By
`check`, it also ends the wait for data, plans that evaluate, measure or probe before their next micro-batch, and
answers before their next token. It interrupts no forward or backward pass, no checkpoint, and nothing within
`exclusive` or `adding`: a gradient that is added, an update with its commit, a part of another rank's state that is
taken over. The answer waits for these. After it, neither lets anyone in for the older generation, so a pass that was
under way adds nothing.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.messages import Form, Generation, Range, Report, StepPlan
from trainctl.trainer.common.errors import AbandonedError, OutdatedError
from trainctl.trainer.data.permutation import Indices, ranges_of

KEPT_REPORTS = 8
"""Newest reports repeated in the answer to a fence: more than an agent can have missed, since it plans one step
ahead."""

_FIRST_SCALE = 65536.0
_MIN_SCALE, _MAX_SCALE = 2.0**-14, 2.0**24
_GROW_SCALE_AFTER = 2000
"""Factors of float16, and the steps without a skip after which one grows."""


@dataclass
class LossScale:
    """The factor that keeps float16 gradients within range: dynamic loss scaling (Micikevicius et al. 2018). Powers of
    two, so scaling rounds nothing. Other dtypes have float32's range and keep a factor of one.

    It changes only when a step commits, and only by what all ranks know; so it is the same on all of them."""

    value: float
    good_steps: int = 0  # since the last change

    @classmethod
    def of(cls, dtype: str) -> "LossScale":
        return cls(_FIRST_SCALE if dtype == "float16" else 1.0)

    def committed(self, dtype: str, skip_reason: str | None) -> None:
        """Halve after a step that wasn't finite, double after 2000 in a row that were. An empty one says nothing."""
        if dtype != "float16" or skip_reason == "empty":
            return
        self.good_steps = 0 if skip_reason else self.good_steps + 1
        if skip_reason:
            self.value = max(_MIN_SCALE, self.value / 2)
        elif self.good_steps >= _GROW_SCALE_AFTER:
            self.value, self.good_steps = min(_MAX_SCALE, self.value * 2), 0


@dataclass
class AccumulatedBatch:
    """The part of a step's global batch whose gradients the accumulators hold."""

    step: int
    origin: Generation  # the generation the batch was first planned in
    divisor: float  # D
    scale: float  # the loss scale the gradients carry
    weights: dict[str, float] = field(default_factory=dict)  # by the objective's names
    tokens: int = 0
    samples: int = 0
    positions: list[Indices] = field(default_factory=list)

    def ranges(self) -> tuple[Range, ...]:
        return ranges_of(np.concatenate(self.positions)) if self.positions else ()


@dataclass(frozen=True)
class FenceAnswer:
    """The parts of a `Fenced` message."""

    last_step: int
    held_from: Generation | None
    held: tuple[Range, ...]
    reports: tuple[Report, ...]


class Progress:
    """One rank's place in its run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.loaded = False  # last_step and cursor are known
        self.last_step = 0
        self.cursor = 0
        self.formed: Generation | None = None
        self.highest: Generation | None = None
        self.leaving = ""
        self.whole = True  # False between the first and the last part of a state that is being taken over
        self.batch: AccumulatedBatch | None = None
        self.last_seq = -1
        self.version = 0  # grows with each change of weights and optimizer
        self.committed_in: Generation | None = None  # generation that made the last step here; None: it was loaded
        self._reports: deque[Report] = deque(maxlen=KEPT_REPORTS)

    @contextmanager
    def exclusive(self, generation: Generation) -> Iterator[None]:
        """Hold off the fence. Raises AbandonedError if `generation` isn't the formed one any more."""
        with self._lock:
            self.check(generation)
            yield

    @contextmanager
    def adding(
        self,
        generation: Generation,
        batch: AccumulatedBatch,
        positions: Indices,
        weights: Mapping[str, float],
        tokens: int,
    ) -> Iterator[None]:
        """Hold the accumulators, as `exclusive` does, while a gradient is added. Its samples are part of the batch if
        nothing is raised."""
        with self._lock:
            self.check(generation)
            yield
            batch.positions.append(positions)
            batch.samples += len(positions)
            batch.tokens += tokens
            for name, weight in weights.items():
                batch.weights[name] = batch.weights.get(name, 0.0) + weight

    def check(self, generation: Generation) -> None:
        """Raise AbandonedError if there is no point in continuing under `generation`; cheap, and needs no lock."""
        if self.leaving or generation != self.formed:
            raise AbandonedError

    def load(self, step: int, cursor: int) -> None:
        """Set where the run stands: the last committed step and the first position after it."""
        with self._lock:
            self.take_over(step, cursor)

    def tear(self) -> None:
        """Note that the first part of another rank's state is about to replace this one's. Call it within
        `exclusive`."""
        self.whole, self.batch = False, None
        self.version += 1

    def take_over(self, step: int, cursor: int) -> None:
        """Note that weights and optimizer are those of another rank, or of a checkpoint. Call it within `exclusive`."""
        self.last_step, self.cursor, self.batch, self.committed_in = step, cursor, None, None
        self.whole = self.loaded = True
        self.version += 1

    def begin(self, plan: StepPlan, scale: float) -> tuple[AccumulatedBatch, bool]:
        """Return the batch that a train plan works on, and whether it is new, that is, the accumulators must be zeroed.
        Call it within `exclusive`. A plan may finish a batch of which this rank holds nothing and others hold the rest.
        Raises ProtocolError for one that finishes another batch than is held, or one that no one holds: samples would
        be lost."""
        held = self.batch
        if plan.finishes is not None:
            if held and (plan.finishes, plan.step, plan.divisor) == (held.origin, held.step, held.divisor):
                return held, False
            if (held and held.positions) or len(plan.work) < 2:
                raise ProtocolError(f"the plan finishes step {plan.step} of {plan.finishes}; {_described(held)}")
        self.batch = AccumulatedBatch(plan.step, plan.finishes or plan.generation, plan.divisor, scale)
        return self.batch, True

    def commit(self, plan: StepPlan) -> None:
        """Note that the plan's step is done, by an update or a skip. Call it within `exclusive`."""
        self.last_step, self.cursor, self.batch = plan.step, plan.cursor + plan.global_batch, None
        self.committed_in = plan.generation
        self.version += 1

    def remember(self, report: Report) -> None:
        """Keep a report for the next fence."""
        self._reports.append(report)

    @property
    def newest_report(self) -> Report | None:
        """Report of the last step that this process has made; None before it."""
        return self._reports[-1] if self._reports else None

    def try_fence(self, generation: Generation, wait_seconds: float) -> FenceAnswer | None:
        """Leave the generation that is formed, `generation` itself included: a fence means that it has failed. None if
        an update is in progress for longer than `wait_seconds`: ask again. A rank whose state is torn says that it
        stands at step 0, so that it is given one. Raises OutdatedError if a higher one has been seen; then nothing has
        changed."""
        if not self._lock.acquire(timeout=wait_seconds):
            return None
        try:
            if self.is_outdated(generation):
                raise OutdatedError(f"{generation} is older than {self.highest}")
            self.highest, self.formed = generation, None
            batch = self.batch if self.batch and self.batch.positions else None
            held = batch.ranges() if batch else ()
            last_step = self.last_step if self.whole else 0
            return FenceAnswer(last_step, batch.origin if batch else None, held, tuple(self._reports))
        finally:
            self._lock.release()

    def form(self, order: Form, *, takes_part: bool = True) -> bool:
        """Join a generation, or be left out of it; False if it is older than one already seen. Joining the same one
        again changes nothing."""
        with self._lock:
            if self.is_outdated(order.generation):
                return False
            if order.generation != self.formed or not takes_part:
                self.highest = order.generation
                self.formed = order.generation if takes_part else None
                self.last_seq = -1
            return True

    def is_outdated(self, generation: Generation) -> bool:
        """Return whether a higher one has been seen."""
        return self.highest is not None and generation < self.highest


def _described(held: AccumulatedBatch | None) -> str:
    if held is None or not held.positions:
        return "this rank has no part of that batch"
    return f"this rank's batch is for step {held.step} in {held.origin}, with D {held.divisor:g}"
