"""Commits: recent train plans as first issued, and the steps that ranks' reports commit."""

from collections.abc import Iterable

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor import rows
from trainctl.node_agent.conductor.state import CannotGoOnError, ConductorState
from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e

KEPT = 4
"""Recent steps kept for late reports; at most two steps are in flight."""

Half = tuple[dict[int, tuple[m.Range, ...]], m.Generation]
"""Positions by rank whose gradients are held, and the generation in which their batch was first planned."""


class Commits:
    """A step is committed by the first report that a rank has applied its update."""

    def __init__(self, state: ConductorState, recent: Iterable[m.StepPlan]) -> None:
        self._state = state
        # As first issued: what a fence leaves of a batch is always dealt out from the whole of it.
        self._plans = {plan.step: plan for plan in recent if plan.finishes is None}
        self._rows: dict[int, m.StepCommitted] = {}
        self._recorded: dict[int, set[int]] = {}  # by step: the ranks whose part has been recorded

    def plan(self, step: int) -> m.StepPlan | None:
        return self._plans.get(step)

    def issued(self, plan: m.StepPlan) -> None:
        if plan.finishes is None:
            self._plans[plan.step] = plan
        oldest = plan.step - KEPT
        for kept in (self._plans, self._rows, self._recorded):
            kept.pop(oldest, None)

    def forget(self, step: int) -> None:
        """What was planned of an uncommitted step is given up; it is planned again."""
        self._plans.pop(step, None)

    def count(self, report: m.Report) -> bool:
        """Take a rank's report of a step, by itself or repeated by a fence; True if it commits the step."""
        row = self._rows.get(report.step)
        if row is None:
            commits = report.step == self._state.progress.step + 1 and report.step in self._plans
            if commits:
                self._recorded[report.step] = {report.rank}
                self._commit(report)
            return commits
        recorded = self._recorded[report.step]
        if report.rank not in recorded:
            recorded.add(report.rank)
            part = rows.rank_step(report, self._state.node(report.rank))
            self._state.decide(d.RankDone(part, row))
        return False

    def _commit(self, report: m.Report) -> None:
        row = self._state.progress.commit(self._plans[report.step], report)
        self._rows[report.step] = row
        self._state.decide(d.Commit(row, rows.rank_step(report, self._state.node(report.rank))))
        if report.skipped:
            self._state.happen(e.StepSkipped(report.step, report.skipped), "warning")
        self._state.conclude(report.step)

    def retract(self) -> None:
        """Undo the last step, whose ranks are lost. Raises CannotGoOnError if its plan isn't known any more."""
        progress = self._state.progress
        plan = self._plans.get(progress.step)
        if plan is None:
            raise CannotGoOnError(f"only lost ranks completed step {progress.step}, and its plan is unknown")
        self._state.decide(d.Retract(progress.step))
        self._state.happen(e.StepRetracted(progress.step), "warning")
        self._rows.pop(progress.step, None)
        self._recorded.pop(progress.step, None)
        progress.step, progress.cursor = progress.step - 1, plan.cursor
        progress.totals = progress.before
        self._state.persist(retracted=plan.step)

    def half_done(self, answers: Iterable[m.Fenced]) -> Half | None:
        """What the accumulators hold of the next step's batch, if they hold parts of one and the same, and nothing has
        been applied to the step since it was planned."""
        plan, durable = self._plans.get(self._state.progress.step + 1), self._state.durable
        if plan is None or durable.mode == "paused":
            return None
        if any(carried.step == plan.step and id not in plan.commands for id, carried in durable.carried.items()):
            return None
        held = {answer.rank: answer.held for answer in answers if answer.held}
        origins = {answer.held_from for answer in answers if answer.held}
        return (held, plan.generation) if origins == {plan.generation} else None
