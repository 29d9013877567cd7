"""Orders: those that the control thread puts into the main thread's queue, and its handler of offers and groups."""

from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import (
    Fence,
    Form,
    Formed,
    FromTrainer,
    Generation,
    GroupFailed,
    Leave,
    Offer,
    Offered,
    StepPlan,
)
from trainctl.trainer.collective.group import Group, ReducerGroup, Solo
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import GroupError, first_line
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity


@dataclass(frozen=True)
class Joined:
    """A generation has been formed: plans that follow reduce over this group. A rank that it was formed without gets
    none."""

    generation: Generation
    group: Group


@dataclass(frozen=True)
class Joining:
    """A generation is being formed, and this rank's reducer has begun to join."""

    form: Form
    group: ReducerGroup


@dataclass(frozen=True)
class Orphaned:
    """The agent has been gone for longer than the run file allows."""

    seconds: float


@dataclass(frozen=True)
class Signalled:
    """A signal ends this process."""

    reason: str


@dataclass(frozen=True)
class Broken:
    """The control thread, or the thread that reads a growing file, cannot continue."""

    error: TrainctlError


Order = StepPlan | Joined | Joining | Fence | Leave | Orphaned | Signalled | Broken


class GroupOrders:
    """`say` sends an answer from the control thread. An order older than what was seen is dropped; one that repeats
    what was done has the same answer again."""

    def __init__(
        self, who: Identity, progress: Progress, orders: "SimpleQueue[Order]", say: Callable[[FromTrainer], None]
    ) -> None:
        self._who, self._progress, self._orders, self._say = who, progress, orders, say
        self.membership: Membership | None = None  # until the model is loaded
        self.outcome: Formed | GroupFailed | None = None  # of the newest order to form, once it is known

    def fence(self, order: Fence) -> None:
        """Kill the reducers, whether they join, sum or wait: a main thread that waits for the sum then gets
        AbandonedError."""
        if self._progress.is_outdated(order.generation):
            return
        self.outcome = None
        if self.membership is not None:
            self.membership.leave()

    def offer(self, order: Offer) -> None:
        generation = order.generation
        if self.membership is None or self._progress.is_outdated(generation) or generation == self._progress.formed:
            return
        try:
            endpoints = self.membership.offer(order)
        except GroupError as error:
            self._say(self.failed(generation, error))
            return
        self._say(Offered(run=self._who.run, rank=self._who.rank, generation=generation, endpoints=endpoints))

    def form(self, order: Form) -> None:
        if self._progress.is_outdated(order.generation):
            return
        if self.outcome is not None and self.outcome.generation == order.generation:
            self._say(self.outcome)
        elif self._who.rank not in order.ranks:
            self._stay_out(order)
        elif order.generation != self._progress.formed and self._progress.form(order):
            self._join(order)

    def abort(self) -> None:
        """From any thread: end the wait for other ranks."""
        if self.membership is not None:
            self.membership.abort()

    def failed(self, generation: Generation, error: GroupError) -> GroupFailed:
        reason = first_line(error)
        return GroupFailed(run=self._who.run, rank=self._who.rank, generation=generation, reason=reason)

    def formed(self, generation: Generation, join_seconds: float = 0.0, level_seconds: float = 0.0) -> Formed:
        return Formed(
            run=self._who.run,
            rank=self._who.rank,
            generation=generation,
            join_seconds=join_seconds,
            level_seconds=level_seconds,
        )

    def _stay_out(self, order: Form) -> None:
        if self._progress.form(order, takes_part=False):
            if self.membership is not None:
                self.membership.leave()
            self._orders.put(Joined(order.generation, Solo()))

    def _join(self, order: Form) -> None:
        try:
            if self.membership is None:
                raise GroupError("the model is not loaded yet")
            if not self._progress.whole and self._who.rank not in order.behind:
                raise GroupError("this rank's state is incomplete: its group failed during a state transfer")
            group = self.membership.form(order)
        except GroupError as error:
            self.outcome = self.failed(order.generation, error)
            logs.concluded(order, self.outcome)
            self._say(self.outcome)
            return
        if isinstance(group, ReducerGroup):
            self._orders.put(Joining(order, group))
            return
        self._orders.put(Joined(order.generation, group))
        self.outcome = self.formed(order.generation)
        logs.concluded(order, self.outcome)
        self._say(self.outcome)
