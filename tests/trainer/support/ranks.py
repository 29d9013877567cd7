"""Several ranks in one process, each with a thread for its model and a reducer process of its own, driven by plans."""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import psutil
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.trainer.collective.group import ReducerGroup
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.reducer_process import ReducerProcess
from trainctl.trainer.collective.shared_buffer import Layout, layout_digest
from trainctl.trainer.collective.standby import Standby
from trainctl.trainer.loop import train
from trainctl.trainer.step.progress import FenceAnswer
from trainctl.trainer.step.rank import copy_state_to_ranks_behind

DEADLINE_SECONDS = HANG_SECONDS
G = 12
NAMES = ("a", "b", "c")
T = TypeVar("T")


def pid_of(reducer: ReducerProcess) -> int:
    """Return the process of a reducer, once there is one."""
    pid: int = until(lambda: reducer.life.pid)
    return pid


def form_of(offer: m.Offer, endpoints: tuple[tuple[str, ...], ...], deadline: float = DEADLINE_SECONDS) -> m.Form:
    """Return the order to form what all ranks were offered, whose layouts have the digest x."""
    return m.Form(
        run="r",
        generation=offer.generation,
        engine=offer.engine,
        ranks=tuple(range(len(endpoints))),
        endpoints=endpoints,
        layout_digest="x",
        deadline_seconds=deadline,
    )


class Rank:
    """One rank; its rig and its groups are used by its own thread, its membership by the test's."""

    def __init__(self, number: int, new_rig: Callable[[], Any], thread: ThreadPoolExecutor, standby: Standby) -> None:
        self.number, self.thread = number, thread
        self.rig: Any = self.call(new_rig)
        layout = Layout(self.rig.backend.shapes, layout_digest(self.rig.backend.shapes))
        self.membership = Membership(number, layout, self.rig.config.group, "", None, standby=standby, nodes=NAMES)
        self.group: ReducerGroup | None = None

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        return self.thread.submit(work)

    def change_rig(self, new_rig: Callable[[], Any]) -> None:
        """Go on in the same group with another model and other data."""
        rig = self.call(new_rig)
        rig.progress.formed, rig.rank.group = self.rig.progress.formed, self.group
        self.rig = rig

    def call(self, work: Callable[[], T]) -> T:
        return self.submit(work).result(DEADLINE_SECONDS)

    def begin(self, form: m.Form) -> None:
        """Do what the control thread does with an order to form."""
        assert self.rig.progress.form(form)
        group = self.membership.form(form)
        self.group = group

    def complete(self, form: m.Form) -> None:
        """Do what the main thread does then."""
        self.group.complete()
        if form.source is not None:
            copy_state_to_ranks_behind(self.rig.rank, self.group, form)
        self.group.formed()
        self.rig.rank.group = self.group

    def fence(self, generation: m.Generation) -> FenceAnswer:
        """Return what the control thread does with a fence."""
        self.membership.leave()
        answer = self.rig.progress.try_fence(generation, DEADLINE_SECONDS)
        assert answer is not None
        return answer

    def reducer(self) -> psutil.Process:
        """The process of the group that is formed."""
        return psutil.Process(pid_of(self.group._reducers[0]))

    def close(self) -> None:
        self.membership.close()
        if self.group is not None:
            self.group.close()


class Ranks:
    """A group of them. Failures come back as values, so that one rank's doesn't hide another's."""

    def __init__(self, makers: Sequence[Callable[..., Any]], engine: m.Engine, standby: Standby) -> None:
        """`makers` make each rank's rig, given its number as `rank`; all have their reducers from `standby`."""
        self.engine: m.Engine = engine
        self.generation = m.Generation(1, 0)
        self.ranks: list[Rank] = []
        self._seq = 0
        for number, make in enumerate(makers):
            thread = ThreadPoolExecutor(1)
            self.ranks.append(Rank(number, functools.partial(make, rank=number), thread, standby))

    def all(self, work: Callable[[Rank], T]) -> list[T | Exception]:
        """`work` on every rank's own thread at once."""
        futures = [rank.submit(functools.partial(work, rank)) for rank in self.ranks]
        found: list[T | Exception] = []
        for future in futures:
            error = future.exception(DEADLINE_SECONDS)
            assert error is None or isinstance(error, Exception)
            found.append(future.result() if error is None else error)
        return found

    def form(self, **changes: Any) -> list[Exception]:
        """Form the next generation; returns what went wrong."""
        form = self.offer(**changes)
        for rank in self.ranks:
            rank.begin(form)
        return [error for error in self.all(lambda rank: rank.complete(form)) if isinstance(error, Exception)]

    def offer(self, **changes: Any) -> m.Form:
        """Have endpoints opened for the next generation, and make the order to form it."""
        self.generation = self.generation.next()
        order = m.Offer(run="r", generation=self.generation, engine=self.engine)
        endpoints = tuple(rank.membership.offer(order) for rank in self.ranks)
        ranks = tuple(rank.number for rank in self.ranks)
        values: dict[str, Any] = {"ranks": ranks, "endpoints": endpoints, "deadline_seconds": DEADLINE_SECONDS}
        return m.Form(run="r", generation=self.generation, engine=self.engine, **(values | changes))

    def plan(self, step: int, shares: Sequence[int], micros: Sequence[int], **changes: Any) -> m.StepPlan:
        """A train plan: the ranks' shares one after another."""
        self._seq += 1
        cursor, work, start = (step - 1) * G, [], (step - 1) * G
        for rank, share, micro in zip(self.ranks, shares, micros, strict=True):
            work.append(m.RankWork(rank.number, (m.Range(start, share),) if share else (), micro))
            start += share
        plan = self.ranks[0].rig.plan(step, 1, cursor=cursor, work=tuple(work), generation=self.generation)
        values: dict[str, Any] = {field: getattr(plan, field) for field in plan.__struct_fields__}
        return m.StepPlan(**(values | {"seq": self._seq} | changes))

    def train(self, plan: m.StepPlan) -> list[m.Report | Exception]:
        return self.all(lambda rank: train(rank.rig.rank, plan, time.perf_counter()))

    def fence(self) -> list[FenceAnswer]:
        self.generation = self.generation.next()
        return [rank.fence(self.generation) for rank in self.ranks]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
            rank.thread.shutdown()
