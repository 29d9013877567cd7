"""The client's part for a program that trains a run by itself: it attaches the run, brings its steps, and ends it."""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from trainctl.protocol.messages import AttachRun, EndRun, GuestRank, GuestStep, Reply, Request, RunKept, RunSteps
from trainctl.protocol.wire import codec

STEPS_BYTES = codec.CONTROL_FRAME_BYTES * 3 // 4
"""Bytes of steps in one request, about; it stays below the largest frame that an agent accepts."""
STEPS_AT_ONCE = 500
"""Most steps in one request."""

R = TypeVar("R", bound=Reply)


class AttachedRuns(ABC):
    """Requests about runs that this program trains. Each can be repeated: what is recorded already changes nothing."""

    @abstractmethod
    async def ask(self, request: Request, wanted: type[R]) -> R: ...

    async def attach_run(
        self, run: str, name: str, ranks: Sequence[GuestRank] = (GuestRank(0),), *,
        kind: Literal["guest", "exec"] = "guest", steps: int | None = None, started_at: float | None = None,
        after_step: int | None = None, weight_unit: str = "tokens", loss_unit: str = "nats per token",
    ) -> RunKept:  # fmt: skip
        """Have the agent show and record a run. `run` is an id of this program's choice: under the same id the run is
        continued, after its newest recorded step or `after_step`, above which steps are then retracted.

        Raises RefusedError if the id is that of a run that the agent trains itself, if too many are attached, or while
        the agent's node is being calibrated.
        """
        request = AttachRun(
            rid=_rid(), run=run, name=name, started_at=time.time() if started_at is None else started_at,
            ranks=tuple(ranks), kind=kind, steps=steps, after_step=after_step,
            weight_unit=weight_unit, loss_unit=loss_unit,
        )  # fmt: skip
        return await self.ask(request, RunKept)

    async def run_steps(self, run: str, steps: Sequence[GuestStep] = ()) -> RunKept:
        """Record steps in their order, and say that the program lives: the agent counts its ranks as lost after 30 s
        without a word. Steps after the reply's `step` are not recorded yet. Raises RefusedError if the run is not
        attached, as after 10 silent minutes: attach it again."""
        kept = None
        for page in _pages(steps):
            kept = await self.ask(RunSteps(rid=_rid(), run=run, steps=page), RunKept)
        assert kept is not None
        return kept

    async def end_run(
        self, run: str, state: Literal["finished", "stopped", "failed"] = "finished", reason: str = ""
    ) -> RunKept:
        """The run is over. Raises RefusedError if it is not attached."""
        return await self.ask(EndRun(rid=_rid(), run=run, state=state, reason=reason), RunKept)


def _pages(steps: Sequence[GuestStep]) -> Iterator[tuple[GuestStep, ...]]:
    """Yield at least one page, each within the limits of a request."""
    page: list[GuestStep] = []
    size = 0
    for step in steps:
        own = len(codec.encode(RunSteps(rid="-", run="-", steps=(step,))))
        if page and (size + own > STEPS_BYTES or len(page) == STEPS_AT_ONCE):
            yield tuple(page)
            page, size = [], 0
        page.append(step)
        size += own
    yield tuple(page)


def _rid() -> str:
    return uuid.uuid4().hex
