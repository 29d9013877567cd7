"""Plans in flight: sent, but not yet reported by all their ranks; and how long their sums may take."""

import dataclasses
import statistics
from collections import deque

from trainctl.protocol import messages as m

LEAST_REDUCE_SECONDS, REDUCE_STEPS = 10.0, 5.0
"""A sum is overdue this many seconds after the time that its size may take, or after this many median steps if that is
longer."""


@dataclasses.dataclass(eq=False)
class PlanInFlight:
    """One plan."""

    plan: m.StepPlan
    since: float  # its ranks are at it: it was issued, or the one before it was done
    soon: set[int] = dataclasses.field(default_factory=set)
    reports: dict[int, m.Report] = dataclasses.field(default_factory=dict)
    summing_since: float | None = None  # all its ranks are in the same sum since then
    told_slow: bool = False  # that it takes longer than expected
    is_done: bool = False  # all its ranks have reported

    def __post_init__(self) -> None:
        self.ranks = {work.rank for work in self.plan.work}

    def at_own_part(self, *, alone: bool) -> set[int]:
        """The ranks that wait for no one and are not done; of a step, one of several has done its part at the sum."""
        done = self.soon if self.plan.kind == "train" and not alone else set(self.reports)
        return self.ranks - done


class InFlight:
    """At most two: one that is finishing, and the one after it."""

    def __init__(self) -> None:
        self._plans: dict[int, PlanInFlight] = {}  # by seq, oldest first
        self._step_seconds: deque[float] = deque(maxlen=15)

    def __bool__(self) -> bool:
        return bool(self._plans)

    def has(self, kind: m.PlanKind) -> bool:
        return any(in_flight.plan.kind == kind for in_flight in self._plans.values())

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

    def add(self, plan: m.StepPlan, now: float) -> None:
        self._plans[plan.seq] = PlanInFlight(plan, now)

    def take_all(self) -> list[m.StepPlan]:
        """Hand out and forget them."""
        taken, self._plans = self._plans, {}
        return [in_flight.plan for in_flight in taken.values()]

    def on_soon(self, soon: m.Soon, now: float) -> bool:
        """True if all ranks of the plan are about to need the next one."""
        in_flight = self._find(soon)
        if in_flight is None:
            return False
        in_flight.soon.add(soon.rank)
        if len(in_flight.soon) < len(in_flight.ranks):
            return False
        if in_flight.summing_since is None:
            in_flight.summing_since = now
        return True

    def on_report(self, report: m.Report, now: float) -> PlanInFlight | None:
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
                following.since = now
        return in_flight

    def _find(self, answer: m.Soon | m.Report) -> PlanInFlight | None:
        found = self._plans.get(answer.seq)
        if found is None or found.plan.generation != answer.generation or answer.rank not in found.ranks:
            return None
        return found

    def late_in_sum(self, now: float, sync_seconds: float, sum_seconds: float) -> PlanInFlight | None:
        """The first plan, if its sum is overdue: a sync, which is nothing but a sum, may take `sync_seconds`, one
        of gradients `sum_seconds` at least."""
        first = self.first
        if first is None:
            return None
        if first.plan.kind == "sync" and first.summing_since is None:
            first.summing_since = now  # what was before it is done, so its ranks are at it
        limit_seconds = sync_seconds if first.plan.kind == "sync" else self._sum_limit_seconds(sum_seconds)
        return first if first.summing_since is not None and now >= first.summing_since + limit_seconds else None

    def _sum_limit_seconds(self, sum_seconds: float) -> float:
        return max(LEAST_REDUCE_SECONDS + sum_seconds, REDUCE_STEPS * self.usual_seconds)
