"""Deadlines of a run: overdue sums, parts that take longer than they should, and ranks that have not answered.

A sum has a deadline, for a rank in it may wait for one that is gone; a rank's own part
has none, for it may just be slow: that is reported, once for each plan. One that makes no progress at all is hung.
"""

import dataclasses
from math import inf

from trainctl.node_agent.conductor.in_flight import InFlight
from trainctl.node_agent.conductor.stages import GRACE_SECONDS, JOIN_SECONDS
from trainctl.node_agent.conductor.state import ConductorState, PlanInFlight
from trainctl.node_agent.planning.rank_models import Rates, level_seconds, sum_seconds, write_seconds
from trainctl.protocol.messages import BUSY_PHASES, Alive, StepPlan
from trainctl.protocol.messages.events import RankChanged

WORKING_PHASES = (*BUSY_PHASES, "optimizer", "commit", "evaluate", "checkpoint", "probe", "sample", "profile")
"""Phases in which a rank works by itself; in all others it waits or loads."""
FIRST_TIMES = 5.0
"""Factor by which the first time that a process does something may take longer: it may compile."""
LONGEST_TIMES = 10.0
"""Factor of the rank's longest stall at such a plan that ended by itself, or of the usual step, up to which a stall is
no hang. The first plan of a kind is no measure: it may compile."""
WRITE_TIMES, LOAD_TIMES = 30.0, 10.0
"""Factor of the time a slow disk should take to write a whole state, and to read it."""
GAP_SECONDS = 3.0
"""Most seconds that count between two heartbeats, which come each second."""


@dataclasses.dataclass
class _Stall:
    mark: tuple[int, str, int]  # progress, phase, step
    heard: float
    seconds: float = 0.0


class StallDetector:
    """Time for which ranks' main threads have stalled, by a number in their heartbeats that grows with their progress.

    Only time in which a rank was heard from counts, so that a machine that slept, a link that was down or an agent that
    was stopped makes no one hang.
    """

    def __init__(self, state: ConductorState) -> None:
        self._state = state
        self._of: dict[int, _Stall] = {}
        self._done: set[tuple[int, str]] = set()  # (rank, kind of plan) since the process was started
        self._longest_seconds: dict[tuple[int, str], float] = {}  # as `_done`, without the first plan of a kind

    def heard(self, alive: Alive) -> None:
        """A heartbeat has come. Of one without the number nothing is known."""
        stall, now = self._of.get(alive.rank), self._state.now
        if alive.progress is None:
            self._of.pop(alive.rank, None)
            return
        mark = (alive.progress, alive.phase, alive.step)
        if stall is not None and stall.mark == mark:
            stall.seconds += min(now - stall.heard, GAP_SECONDS)
            stall.heard = now
            return
        at = alive.rank, self.kind(alive.rank)
        if stall is not None and stall.mark[1] in WORKING_PHASES and at in self._done:
            self._longest_seconds[at] = max(self._longest_seconds.get(at, 0.0), stall.seconds)
        self._of[alive.rank] = _Stall(mark, now)

    def done(self, rank: int, kind: str) -> None:
        """A rank has done a plan of this kind. How long the first one stalled is over, and forgotten."""
        if self.is_first(rank, kind):
            self._done.add((rank, kind))
            self._of.pop(rank, None)

    def is_first(self, rank: int, kind: str) -> bool:
        """Return whether its process has done no plan of this kind yet."""
        return (rank, kind) not in self._done

    def forget(self, rank: int) -> None:
        """Drop what was measured of a rank's process: another one replaces it."""
        self._of.pop(rank, None)
        self._done = {done for done in self._done if done[0] != rank}
        self._longest_seconds = {at: seconds for at, seconds in self._longest_seconds.items() if at[0] != rank}

    def seconds(self, rank: int) -> float:
        """Return how long it has not made progress, as far as it was heard from."""
        return self._of[rank].seconds if rank in self._of else 0.0

    def is_at_work(self, rank: int) -> bool:
        """Return whether it was last heard from at something of its own."""
        return rank in self._of and self._of[rank].mark[1] in WORKING_PHASES

    def limit_seconds(self, rank: int, kind: str, usual_seconds: float) -> float:
        """From when on a stall at a plan of this kind is a hang. `usual_seconds`: of a step, 0 if not known."""
        min_seconds = self._state.config.group.hung_seconds * (FIRST_TIMES if self.is_first(rank, kind) else 1.0)
        writing_seconds = WRITE_TIMES * write_seconds(self._state.parameters) if kind == "checkpoint" else 0.0
        longest_seconds = max(usual_seconds, self._longest_seconds.get((rank, kind), 0.0))
        return max(min_seconds, LONGEST_TIMES * longest_seconds, writing_seconds)

    def load_limit_seconds(self) -> float:
        """From when on a stall while it loads is a hang."""
        return max(self._state.config.run.load_seconds, LOAD_TIMES * write_seconds(self._state.parameters))

    def kind(self, rank: int) -> str:
        """The kind of plan that its phase belongs to."""
        phase = self._of[rank].mark[1] if rank in self._of else ""
        return phase if phase in ("evaluate", "checkpoint", "probe", "sample", "profile") else "train"


MIN_SLOW_SECONDS, SLOW_TIMES = 30.0, 10.0
"""A part is reported after this many seconds, or this many times its expected time if that is longer."""
MIN_LATE_SECONDS, LATE_TIMES = 10.0, 3.0
"""A part is shown as late after this many seconds, or this many times its expected time; without one, once reported."""
NEVER_LATE = ("sync", "sample")
"""Kinds of plans that are not reported as slow: one has a deadline, the other takes as long as its answers are."""
COMPILING = ("probe", "measure", "train", "evaluate")
"""Kinds of plans whose first one in a process compiles the model, if the run file wants it compiled."""
HUNG_PART = 0.5
"""Fraction of the time that makes a stall a hang after which it is shown as hung."""
JOINS = 2.0
"""A stall that lasts as long as this many rendezvous is a hang."""
PARTS = {
    "train": "step {step}",
    "evaluate": "the evaluation at step {step}",
    "checkpoint": "the checkpoint at step {step}",
    "measure": "the measurement of initial shares",
    "probe": "the probe",
    "sample": "the samples at step {step}",
    "defragment": "the clearing of caches at step {step}",
    "profile": "the start of the profile at step {step}",
}


def _part(plan: StepPlan) -> str:
    return PARTS[plan.kind].format(step=plan.step)


class Deadlines:
    """Looks at what is under way; only the conductor does something about it."""

    def __init__(self, state: ConductorState, in_flight: InFlight, rates: Rates) -> None:
        self._state, self._in_flight, self._rates = state, in_flight, rates
        self.stalls = StallDetector(state)
        self._unformed_since = inf  # while there is a group, or none yet

    @property
    def first(self) -> PlanInFlight | None:
        """The oldest plan that some of its ranks are still at."""
        return self._in_flight.first if self._state.stage == "formed" else None

    @property
    def awaited(self) -> list[int]:
        """The live ranks whose answer the run can't do without, ascending."""
        return self._state.awaited if self.first is None else sorted(self.first.ranks - self.first.reports.keys())

    @property
    def has_deadline(self) -> bool:
        """Return whether what is waited for is fenced of itself when it takes too long."""
        summing = self.first is not None and self.first.summing_since is not None and self._state.engine != "none"
        return summing or self._state.is_forming

    @property
    def expected_seconds(self) -> float:
        """Return what the step or plan in progress should take; 0 as long as nothing is known of that."""
        usual = self._in_flight.usual_seconds
        return max(usual, self._expected_of(self.first.plan)) if self.first is not None else usual

    def _expected_of(self, plan: StepPlan) -> float:
        if plan.kind == "checkpoint":
            return write_seconds(self._state.any_ready.parameters)
        models = self._rates.timed(work.rank for work in plan.work)
        timed = [(models[work.rank], work) for work in plan.work if work.rank in models]
        seconds = [
            model.busy_seconds(sum(piece.count for piece in work.ranges), work.micro_batch) for model, work in timed
        ]
        alone = max(seconds, default=0.0)
        return max(alone, self._in_flight.usual_seconds) if plan.kind == "train" else alone

    def overdue(self) -> str:
        """Return which nodes have not come out of a sum in time; empty if none. A rank alone has no one to wait for."""
        if self._state.stage != "formed" or self._state.engine == "none":
            return ""
        parameters = self._state.any_ready.parameters
        late = self._in_flight.late_in_sum(JOIN_SECONDS + level_seconds(parameters), sum_seconds(parameters))
        if late is None:
            return ""
        silent = self._state.nodes(sorted(late.ranks - late.reports.keys()))
        return f"{silent} did not finish the sum of step {late.plan.step} in time"

    # ------------------------------------------------------------ parts

    def late(self) -> dict[int, str]:
        """Return why, of each rank that takes much longer over its part than is usual."""
        first = self.first
        if first is None or first.plan.kind in NEVER_LATE:
            return {}
        usual = self._expected_of(first.plan)
        limit_seconds = max(MIN_LATE_SECONDS, LATE_TIMES * usual) if usual else MIN_SLOW_SECONDS
        if self._state.now - first.since < limit_seconds:
            return {}
        why = f"{_part(first.plan)} is taking long"
        if usual:  # two figures, or all before the point; never an exponent
            why += f" (usually {usual:.2g} s)" if usual < 10 else f" (usually {usual:.0f} s)"
        return dict.fromkeys(sorted(self._at_own_part(first)), why)

    def compiles(self, rank: int) -> bool:
        """Return whether a rank's process is at its first plan of a kind, and compiles the model for it."""
        first, ready = self.first, self._state.ready.get(rank)
        if first is None or ready is None or ready.compute is None or ready.compute.compile == "off":
            return False
        return first.plan.kind in COMPILING and self.stalls.is_first(rank, first.plan.kind)

    @property
    def end_of_part(self) -> str:
        """Until when what is under way continues, in words."""
        newest = self._in_flight.newest
        if newest is None or newest.plan.kind == "sync":
            return "until the group has formed again"
        return f"until {_part(newest.plan)} is done"

    def stalls_as_parts(self) -> dict[int, float]:
        """Return how long each rank waited for has made no progress, as a part of what makes a hang. For each tick."""
        state, first, limits = self._state, self.first, {}
        forms = state.stage not in ("loading", "formed")
        since = self._unformed_since = min(self._unformed_since, state.now) if forms else inf
        if state.stage in ("fencing", "forming"):
            # One that waits for the others has a deadline itself, and makes progress by that, at the latest with the
            # next rendezvous; one may still be at its last plan. A fence is answered at once but in an update.
            join_seconds = JOINS * (JOIN_SECONDS + GRACE_SECONDS + level_seconds(state.parameters))
            for rank in state.awaited:
                limits[rank] = self._limit_seconds(rank) if self.stalls.is_at_work(rank) else join_seconds
        elif first is not None and first.plan.kind != "sync":
            since = first.since
            limits = {rank: self._limit_seconds(rank, first.plan.kind) for rank in sorted(self._at_own_part(first))}
        return {rank: min(self.stalls.seconds(rank), state.now - since) / limit for rank, limit in limits.items()}

    def _limit_seconds(self, rank: int, kind: str = "") -> float:
        return self.stalls.limit_seconds(rank, kind or self.stalls.kind(rank), self._in_flight.usual_seconds)

    def _at_own_part(self, plan: PlanInFlight) -> set[int]:
        return plan.at_own_part(alone=self._state.engine == "none")

    def report_slow(self) -> None:
        """An event that names who has not finished a part long after it should have."""
        first = self.first
        if first is None or first.plan.kind in NEVER_LATE or first.is_slow:
            return
        slow, waited_seconds = self._at_own_part(first), self._state.now - first.since
        if slow and waited_seconds >= max(MIN_SLOW_SECONDS, SLOW_TIMES * self._expected_of(first.plan)):
            first.is_slow = True
            labels = tuple(self._state.settings.label(rank) for rank in sorted(slow))
            text = f"{_part(first.plan)} after {waited_seconds:.0f} s"
            self._state.happen(RankChanged(labels, "slow", text), "warning", first.plan.step)
