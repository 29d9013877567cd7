"""A simulated trainer: it takes the conductor's orders and answers as a real one does, in simulated time.

It has no model. Its state is the number of its last step, and the positions in its accumulators. The reducers of one
generation are a group: a sum comes out for all once the last rank has arrived, or fails for those that wait.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any

from trainctl.node_agent.conductor import events as conductor_events
from trainctl.node_agent.planning import plans
from trainctl.node_agent.simulate.models import (
    JOIN_SECONDS,
    NOTICE_SECONDS,
    WORD_SECONDS,
    Clock,
    DeviceModel,
    SimulatedLinks,
)
from trainctl.node_agent.simulate.scenario import Scenario
from trainctl.node_agent.simulate.simulated_reports import InStep, RankReports, done_by
from trainctl.protocol import messages

Done = Callable[[], None]
Say = Callable[[conductor_events.Input], None]


class SimulatedGroup:
    """Group of the ranks of one `form` order."""

    def __init__(self, form: messages.Form, links: SimulatedLinks, queue: Clock) -> None:
        self.form, self.sum_seconds = form, links.sum_seconds(form.ranks)
        self._queue, self._is_broken = queue, False
        self._waiting: dict[Hashable, dict[int, tuple[Done, Done]]] = {}

    def arrive(self, what: Hashable, rank: int, seconds: float, done: Done, failed: Done) -> None:
        """A rank waits for the others in `what`, which takes so many seconds from the last one's arrival."""
        waiting = self._waiting.setdefault(what, {})
        waiting[rank] = done, failed
        if self._is_broken:
            self._fail()
        elif len(waiting) == len(self.form.ranks):
            del self._waiting[what]
            self._queue.after(seconds, partial(_finish, [done for done, _ in waiting.values()]))

    def break_up(self) -> None:
        """A rank has left or died: those that wait notice it."""
        self._is_broken = True
        self._fail()

    def _fail(self) -> None:
        for waiting in self._waiting.values():
            for _, failed in waiting.values():
                self._queue.after(NOTICE_SECONDS, failed)
        self._waiting.clear()


Groups = dict[messages.Generation, SimulatedGroup]


def _finish(each: Iterable[Done]) -> None:
    for done in each:
        done()


REPORTS_KEPT = 8
"""Newest reports that an answer to a fence repeats."""


class SimulatedRank:
    """One rank. `say` receives its messages; all ranks share `groups`, which has the newest."""

    def __init__(self, scenario: Scenario, reports: RankReports, queue: Clock, say: Say, groups: Groups) -> None:
        self._messages, self.rank, self._queue, self._say, self._groups = reports, reports.rank, queue, say, groups
        node, self._load_seconds = [*scenario.config.nodes][self.rank], scenario.nodes[self.rank].load_seconds
        self._device = DeviceModel(reports.spec, scenario.nodes[self.rank], scenario.seed, node)
        self._links = scenario.links
        self.alive = False
        self.deaths = 0
        self._life = self._work = 0  # numbers of its process and of what it does: what is of older ones is over
        self._failed_at: set[int] = set()
        self._place = 0  # of its work in a plan
        self._plan_began = 0.0
        self._forget(0, 0)

    def _forget(self, step: int, cursor: int) -> None:
        """A new process, with the state of a step."""
        self.last_step, self.cursor = step, cursor
        self.loaded = False
        self._generation: messages.Generation | None = None
        self._highest: messages.Generation | None = None
        self._group: SimulatedGroup | None = None
        self._plans = deque[messages.StepPlan]()
        self._held: tuple[messages.Range, ...] = ()
        self._held_from: messages.Generation | None = None
        self._begun: tuple[messages.Generation, int] | None = None
        self._in_step: InStep | None = None
        self._free_at = 0.0
        self._reports = deque[messages.Report](maxlen=REPORTS_KEPT)

    # ------------------------------------------------------------ its process

    def start(self, step: int = 0, cursor: int = 0) -> None:
        """Start its process, which has the state of a step once it has loaded."""
        self._forget(step, cursor)
        self.alive = True
        self._life += 1
        self._work += 1
        self._later(self._load_seconds, self._load)
        seconds = self._device.seconds_to_failure()
        if seconds < inf:
            life = self._life
            self._queue.after(seconds, lambda: self.die("ended by a simulated failure") if self._life == life else None)

    def _load(self) -> None:
        self.loaded = True
        self._say(self._messages.ready(self.last_step, self.cursor))

    def die(self, why: str) -> None:
        """End as by SIGKILL: ranks that wait for this one in a sum notice it, and so does its agent."""
        if not self.alive:
            return
        self.deaths += 1
        self._end(False, f"was {why}", NOTICE_SECONDS)

    def _end(self, clean: bool, why: str, seconds: float) -> None:
        self.alive = False
        self._life += 1
        self._leave()
        self._queue.after(seconds, lambda: self._say(conductor_events.RankEnded(self.rank, clean, why)))

    def alive_message(self) -> messages.Alive:
        """Return what a trainer that works says every second."""
        phase, detail = ("backward", "") if self.loaded else ("loading", "simulated: loading")
        return messages.Alive(
            run=self._messages.run,
            rank=self.rank,
            generation=self._highest,
            step=self.last_step + 1,
            phase=phase,
            progress=int(self._queue.now),
            detail=detail,
        )

    @property
    def is_busy_for(self) -> float:
        """Seconds since it began its plan; infinite without one."""
        return self._queue.now - self._plan_began if self._plans else inf

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        """Unless it leaves its group or ends before."""
        work = self._work
        self._queue.after(seconds, lambda: what() if self._work == work else None)

    # ------------------------------------------------------------ orders

    def take(self, order: messages.ToTrainer) -> None:
        """An order of the conductor."""
        if not self.alive or not self.loaded:
            return
        match order:
            case messages.Leave():
                self._end(True, "exited with 0", WORD_SECONDS)
            case messages.StepPlan() if order.generation == self._generation:
                self._plans.append(order)
                if len(self._plans) == 1:
                    self._begin_next()
            case messages.Fence() | messages.Offer() | messages.Form() if (
                self._highest is None or order.generation >= self._highest
            ):
                self._highest = order.generation
                self._take_membership(order)

    def _take_membership(self, order: messages.Fence | messages.Offer | messages.Form) -> None:
        same: dict[str, Any] = {"run": self._messages.run, "rank": self.rank, "generation": order.generation}
        match order:
            case messages.Fence():
                self._leave()
                self._answer(
                    messages.Fenced(
                        **same,
                        last_step=self.last_step,
                        held_from=self._held_from if self._held else None,
                        held=self._held,
                        reports=tuple(self._reports),
                    )
                )
            case messages.Offer():
                self._answer(messages.Offered(**same, endpoints=(f"127.0.0.1:{self.rank + 1}",)))
            case messages.Form():
                self._leave()
                self._form(order)

    def _answer(self, message: conductor_events.Input) -> None:
        self._later(WORD_SECONDS, lambda: self._say(message))

    def _leave(self) -> None:
        """Give up what is in progress; what the accumulators hold by now stays."""
        if self._in_step is not None:
            step, seconds = self._in_step, self._queue.now - self._in_step.began
            self._hold(done_by(step.left, step.part, seconds))
        self._in_step, self._generation = None, None
        self._work += 1
        self._plans.clear()
        if self._group is not None:
            self._group.break_up()
            self._group = None

    def _hold(self, pieces: Sequence[messages.Range]) -> None:
        self._held = tuple(plans.merge((*self._held, *pieces)))

    # ------------------------------------------------------------ its group

    def _form(self, form: messages.Form) -> None:
        self._generation = form.generation
        if self.rank not in form.ranks:
            return
        if form.engine == "none":
            self._answer(self._messages.formed(form, 0.0))
            return
        if form.generation not in self._groups:
            self._groups.clear()
            self._groups[form.generation] = SimulatedGroup(form, self._links, self._queue)
        self._group = self._groups[form.generation]
        level = self._links.transfer_seconds(form.ranks) if form.behind else 0.0
        self._arrive("join", JOIN_SECONDS + level, partial(self._joined, form, level))

    def _arrive(self, what: object, seconds: float, done: Callable[[], None]) -> None:
        """Wait for the group's other ranks, unless it leaves before."""
        work, group = self._work, self._group
        assert group is not None
        group.arrive(
            what,
            self.rank,
            seconds,
            lambda: done() if self._work == work else None,
            lambda: self._say_broken() if self._work == work else None,
        )

    def _say_broken(self) -> None:
        if self._generation is not None:
            reason = "simulated: connection closed by peer"
            self._say(
                messages.GroupFailed(run=self._messages.run, rank=self.rank, generation=self._generation, reason=reason)
            )

    def _joined(self, form: messages.Form, level: float) -> None:
        if self.rank in form.behind:
            self.last_step, self.cursor = form.step, form.cursor
            self._held, self._held_from, self._begun = (), None, None
        self._free_at = self._queue.now
        self._say(self._messages.formed(form, level))

    # ------------------------------------------------------------ steps

    def _begin_next(self) -> None:
        plan, self._plan_began = self._plans[0], self._queue.now
        place = self._place if self._place < len(plan.work) else 0
        if plan.work[place].rank != self.rank:
            place = self._place = next(place for place, work in enumerate(plan.work) if work.rank == self.rank)
        mine = plan.work[place]
        if plan.kind == "train":
            self._begin_step(plan, mine)
        elif plan.kind == "sync" and self._group is not None:
            seconds = self._links.transfer_seconds(self._group.form.ranks)
            self._arrive(plan.seq, seconds, partial(self._end_side, plan, mine, seconds))
        else:
            seconds = self._messages.side_seconds(self._device, plan, mine)
            self._later(seconds, partial(self._end_side, plan, mine, seconds))

    def _begin_step(self, plan: messages.StepPlan, mine: messages.RankWork) -> None:
        """Begin a step's passes. As in a trainer, a batch is continued only if the plan finishes that same batch."""
        if plan.finishes is None or not self._held:
            self._held = ()
        self._held_from = plan.finishes or plan.generation
        left = tuple(plans.subtract(mine.ranges, self._held)) if self._held else mine.ranges
        count, now = sum(piece.count for piece in left), self._queue.now
        part = self._device.part(plan.step, count, mine.micro_batch, now)
        self._in_step = InStep(plan, mine, left, part, now, max(now - self._free_at, 0.0))
        if self._device.fails_at(plan.step) and plan.step not in self._failed_at:
            self._failed_at.add(plan.step)
            self._later(part.busy / 2, partial(self.die, f"ended by a simulated failure in step {plan.step:,}"))
        self._later(part.busy, self._accumulated)

    def _accumulated(self) -> None:
        """Have the group sum the gradients, which are there now."""
        step = self._in_step
        assert step is not None
        plan = step.plan
        work = self._work
        self._say(messages.Soon(run=self._messages.run, rank=self.rank, generation=plan.generation, seq=plan.seq))
        if self._work != work:
            return
        optimizer = step.part.optimizer
        if self._group is None:
            self._later(optimizer, self._updated)
        else:
            seconds = self._group.sum_seconds + optimizer
            self._arrive(plan.seq, seconds, self._updated)

    def _updated(self) -> None:
        step = self._in_step
        assert step is not None
        self._hold(step.left)
        report = self._messages.of_step(step, self._held, self._queue.now)
        self.last_step, self.cursor = step.plan.step, step.plan.cursor + step.plan.global_batch
        self._held, self._held_from, self._in_step = (), None, None
        self._end_plan(report)

    def _end_side(self, plan: messages.StepPlan, mine: messages.RankWork, seconds: float) -> None:
        if plan.kind == "checkpoint" and self.rank in plan.writers and self._messages.writes_in_background:
            # A copy that is complete later, whatever its group does meanwhile; not if its process ends before.
            life, done = self._life, self._messages.checkpointed(plan)
            self._queue.after(self._messages.write_seconds, lambda: self._say(done) if self._life == life else None)
        self._end_plan(self._messages.of_side(plan, mine, seconds, self._queue.now))

    def _end_plan(self, report: messages.Report) -> None:
        self._plans.popleft()
        self._reports.append(report)
        self._free_at = self._queue.now
        if self._plans:
            self._begin_next()
        self._say(report)


def make_ranks(scenario: Scenario, run: str, started_at: float, queue: Clock, say: Say) -> dict[int, SimulatedRank]:
    """Return the ranks of a run, none of them started. `started_at`: the queue's beginning, in Unix seconds."""
    reports, groups = [RankReports(scenario, run, rank, started_at) for rank in scenario.nodes], Groups()
    return {each.rank: SimulatedRank(scenario, each, queue, say, groups) for each in reports}
