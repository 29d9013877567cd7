"""Plans in flight, and the steps that the ranks' reports of them commit."""

import statistics
from collections import deque
from collections.abc import Iterable

from trainctl.node_agent.conductor.events import Commit, RankDone, Retract
from trainctl.node_agent.conductor.state import CannotGoOnError, ConductorState, PlanInFlight, rank_step
from trainctl.protocol.messages import Fenced, Generation, PlanKind, Range, Report, Soon, StepCommitted, StepPlan
from trainctl.protocol.messages.events import StepRetracted, StepSkipped

MIN_REDUCE_SECONDS, REDUCE_STEPS = 10.0, 5.0
"""A sum is overdue this many seconds after the time that its size may take, or after this many median steps if that is
longer."""


class InFlight:
    """At most two plans: one that is finishing, and the one after it."""

    def __init__(self, state: ConductorState) -> None:
        self._state, self._plans = state, state.in_flight
        self._step_seconds: deque[float] = deque(maxlen=15)

    def has(self, kind: PlanKind) -> bool:
        return any(in_flight.plan.kind == kind for in_flight in self._plans.values())

    @property
    def is_empty(self) -> bool:
        """Return whether no plan is under way, and all steps that were planned are committed."""
        return not self._plans and self._state.progress.step == self._state.planned_step

    @property
    def may_issue(self) -> bool:
        """One plan ahead: nothing under way, or one train plan whose gradients all ranks have accumulated."""
        if len(self._plans) != 1:
            return not self._plans
        (only,) = self._plans.values()
        return only.plan.kind == "train" and only.soon >= only.ranks

    @property
    def first(self) -> PlanInFlight | None:
        """The one that is finishing, or the only one."""
        return next(iter(self._plans.values()), None)

    @property
    def newest(self) -> PlanInFlight | None:
        """The one that was issued last."""
        return next(reversed(self._plans.values()), None)

    @property
    def usual_seconds(self) -> float:
        """The median of recent steps, 0 before the first."""
        return statistics.median(self._step_seconds) if self._step_seconds else 0.0

    def add(self, plan: StepPlan) -> None:
        self._plans[plan.seq] = PlanInFlight(plan, self._state.now)

    def take_all(self) -> list[StepPlan]:
        """Hand out and forget them."""
        taken = [in_flight.plan for in_flight in self._plans.values()]
        self._plans.clear()
        return taken

    def on_soon(self, soon: Soon) -> bool:
        """True if all ranks of the plan are about to need the next one."""
        in_flight = self._find(soon)
        if in_flight is None:
            return False
        in_flight.soon.add(soon.rank)
        if len(in_flight.soon) < len(in_flight.ranks):
            return False
        if in_flight.summing_since is None:
            in_flight.summing_since = self._state.now
        return True

    def on_report(self, report: Report) -> PlanInFlight | None:
        """The plan it is of, unless the rank has reported that already."""
        in_flight = self._find(report)
        if in_flight is None or report.rank in in_flight.reports:
            return None
        if report.kind == "train" and not in_flight.reports:
            self._step_seconds.append(report.step_seconds)
        in_flight.reports[report.rank] = report
        if len(in_flight.reports) == len(in_flight.ranks):
            in_flight.is_done = True
            del self._plans[report.seq]
            for following in self._plans.values():
                following.since = self._state.now
        return in_flight

    def _find(self, answer: Soon | Report) -> PlanInFlight | None:
        in_flight = self._plans.get(answer.seq)
        if in_flight is None or in_flight.plan.generation != answer.generation or answer.rank not in in_flight.ranks:
            return None
        return in_flight

    def late_in_sum(self, sync_seconds: float, sum_seconds: float) -> PlanInFlight | None:
        """The first plan, if its sum is overdue: a sync, which is nothing but a sum, may take `sync_seconds`, one
        of gradients `sum_seconds` at least."""
        first = self.first
        if first is None:
            return None
        if first.plan.kind == "sync" and first.summing_since is None:
            first.summing_since = self._state.now  # what was before it is done, so its ranks are at it
        min_seconds = max(MIN_REDUCE_SECONDS + sum_seconds, REDUCE_STEPS * self.usual_seconds)
        limit_seconds, since = sync_seconds if first.plan.kind == "sync" else min_seconds, first.summing_since
        return first if since is not None and self._state.now >= since + limit_seconds else None


KEPT = 4
"""Recent steps kept for late reports; at most two steps are in flight."""

Half = tuple[dict[int, tuple[Range, ...]], Generation]
"""Positions by rank whose gradients are held, and the generation in which their batch was first planned."""


class Commits:
    """Recent train plans as first issued, and the steps that the first report of an applied update commits."""

    def __init__(self, state: ConductorState, recent: Iterable[StepPlan]) -> None:
        self._state = state
        self.plans = {plan.step: plan for plan in recent if plan.finishes is None}
        """By step, as first issued: what a fence leaves of a batch is always dealt out from the whole of it."""
        self._rows: dict[int, StepCommitted] = {}
        self._recorded: dict[int, set[int]] = {}  # by step: the ranks whose part has been recorded

    def issued(self, plan: StepPlan) -> None:
        if plan.finishes is None:
            self.plans[plan.step] = plan
        oldest = plan.step - KEPT
        for kept in (self.plans, self._rows, self._recorded):
            kept.pop(oldest, None)

    def count(self, report: Report) -> bool:
        """Take a rank's report of a step, by itself or repeated by a fence; True if it commits the step."""
        state, step, rank = self._state, report.step, report.rank
        row = self._rows.get(step)
        if row is not None:
            if rank not in self._recorded[step]:
                self._recorded[step].add(rank)
                state.decide(RankDone(rank_step(report, state.node(rank)), row))
            return False
        if step != state.progress.step + 1 or step not in self.plans:
            return False
        self._recorded[step] = {rank}
        row = self._rows[step] = state.progress.commit(self.plans[step], report)
        state.decide(Commit(row, rank_step(report, state.node(rank))))
        if report.skipped:
            state.happen(StepSkipped(step, report.skipped), "warning")
        state.end_carried(step)
        return True

    def retract(self) -> None:
        """Undo the last step, whose ranks are lost. Raises CannotGoOnError if its plan isn't known any more."""
        progress = self._state.progress
        plan = self.plans.get(progress.step)
        if plan is None:
            raise CannotGoOnError(f"only lost ranks completed step {progress.step}, and its plan is unknown")
        self._state.decide(Retract(plan.step))
        self._state.happen(StepRetracted(plan.step), "warning")
        self._rows.pop(plan.step, None)
        self._recorded.pop(plan.step, None)
        progress.step, progress.cursor = progress.step - 1, plan.cursor
        progress.totals = progress.before
        self._state.persist(retracted=plan.step)

    def half_done(self, answers: Iterable[Fenced]) -> Half | None:
        """Return what the accumulators hold of the next step's batch, if they hold parts of one and the same, and
        nothing has been applied to the step since it was planned."""
        plan, durable = self.plans.get(self._state.progress.step + 1), self._state.durable
        if plan is None or durable.mode == "paused":
            return None
        if any(carried.step == plan.step and id not in plan.commands for id, carried in durable.carried.items()):
            return None
        held = {answer.rank: answer.held for answer in answers if answer.held}
        origins = {answer.held_from for answer in answers if answer.held}
        return (held, plan.generation) if origins == {plan.generation} else None
