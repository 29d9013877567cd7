"""The estimate of a run's end: the time until its last step, with its best and worst case. Pure.

The time left is a sum of what has been measured in the run itself:

    steps        the steps left times the mean of the newest ordinary steps
    long steps   steps that took far longer than usual: how often, times how much longer
    plans        the evaluations, checkpoints and other plans that are due, times the mean of the newest ones
    faults       how often by the hour, times what each took: recovery, and steps that had to be made again

A run without a fault so far isn't taken for one that never has any: each rate begins with an assumed cost.
"""

import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

RECENT_STEPS: Final = 256
"""Newest ordinary steps whose mean counts: more would follow a drift late, fewer would vary by chance."""
WARM_UP_STEPS: Final = 10
"""First steps after a start or a change of the plan that don't count, once there are more: devices compile."""
FARTHEST: Final = 0.5
"""Part of the median by which an ordinary step differs from it at most, if its scatter is small."""
FARTHEST_DEVIATIONS: Final = 4.0
"""Standard deviations by which it differs at most if its scatter is large: texts of different lengths take different
times."""
LEVEL_STEPS: Final = 8
"""Exceptional steps in a row from which they are the new level."""
NEWEST_PLANS: Final = 8
"""Newest plans of a kind whose mean counts."""
BEST, WORST = 1.5, 2.1
"""Distances of the best and the worst case from the mean, in standard deviations: 93 of 100 simulated runs end between
them. Rare and large costs make the time left skew."""
DRIFT: Final = 0.03
"""Assumed drift of the speed over a whole run, relative: a random walk by D differs in the mean of the part p that is
left by D sqrt(p / 3)."""
_HOUR_SECONDS: Final = 3600.0
_PLAN_SPREAD: Final = 0.5
"""Assumed relative error of the time of a plan that hasn't been made yet."""
_STEP_SPREAD: Final = 0.3
"""Assumed scatter of steps, relative, while there are fewer than LEVEL_STEPS."""
_QUARTILES: Final = 1.349
"""Distance of the quartiles of a normal distribution in standard deviations."""


@dataclass(frozen=True)
class Schedule:
    """Steps at which plans of one kind are due."""

    every_steps: int  # 0: never, but perhaps at the end
    at_end: bool = False  # whether one follows the last step
    assumed_seconds: float = 0.0  # what one takes, as long as none has been made

    def left(self, step: int, steps: int) -> int:
        """Return how many follow after `step` in a run of so many steps."""
        among = (steps - 1) // self.every_steps - step // self.every_steps if self.every_steps else 0
        return max(among, 0) + self.at_end


@dataclass(frozen=True)
class TimeLeft:
    """The seconds until a run is done."""

    best: float
    expected: float
    worst: float


@dataclass(frozen=True)
class Predicted:
    """The expected time of a step of a run that hasn't begun."""

    seconds: float
    error: float  # relative standard error


class Costs(msgspec.Struct, frozen=True):
    """Sums over the rare costs of one sort so far."""

    events: int = 0
    total: float = 0.0
    squares: float = 0.0

    def after(self, cost: float) -> "Costs":
        """Return the sums with one cost more."""
        return Costs(self.events + 1, self.total + cost, self.squares + cost * cost)


@dataclass(frozen=True)
class Prior:
    """Costs that are assumed before any has been seen."""

    events: float  # number of costs
    exposure: float  # time within which they come
    cost: float  # mean of one

    def count(self, events: int, exposure: float, left: float) -> float:
        """Return how many are still to come within `left`, after so many within `exposure`."""
        return (events + self.events) / (exposure + self.exposure) * left

    def to_come(self, seen: Costs, exposure: float, left: float) -> "Moments":
        """Return the sum of the costs to come within `left`, of a Poisson process whose rate isn't known well."""
        count = self.count(seen.events, exposure, left)
        mean = (seen.total + self.cost) / (seen.events + 1)
        square = (seen.squares + 2 * self.cost**2) / (seen.events + 1)
        return Moments(count * mean, count * square + (count * mean) ** 2 / (seen.events + self.events))


@dataclass(frozen=True)
class Moments:
    """The mean and the variance of a part of the time left."""

    mean: float
    variance: float

    def plus(self, other: "Moments", factor: float = 1.0) -> "Moments":
        """Return the sum with an independent part, in units of `factor`."""
        return Moments(self.mean + factor * other.mean, self.variance + factor**2 * other.variance)


_LONG_STEPS: Final = Prior(0.5, 50.0, 3.0)
"""Exposure in steps, cost in ordinary steps."""
_FAULTS: Final = Prior(0.5, 0.5, 60.0)
"""Exposure in hours, cost in seconds."""
_RETURNS: Final = Prior(1.0, 20.0, 0.0)
"""Exposure in faults: one in 20 takes the run back to a checkpoint."""


class EtaFacts(msgspec.Struct, frozen=True):
    """The measurements of a run beside its newest steps, kept over restarts of the agent."""

    hours: float = 0.0  # in which it made steps, plans or recovered
    steps: int = 0  # among which long ones were counted
    long_steps: Costs = Costs()  # in ordinary steps beyond the first
    faults: Costs = Costs()  # in seconds, without steps made again
    returns: int = 0  # faults after which the run went back to a checkpoint
    plans: dict[str, tuple[float, ...]] = {}  # seconds of the newest plans of each kind


class Eta:
    """Follows one run; `left` says how long it still takes."""

    def __init__(
        self,
        steps: int,
        facts: EtaFacts = EtaFacts(),  # noqa: B008  frozen
        predicted: Predicted | None = None,
    ) -> None:
        """Follow a run of so many steps. `predicted` counts until its first step is made."""
        self._steps, self.facts, self.step_done, self._predicted = steps, facts, 0, predicted
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []  # the same
        self._exceptions: list[float] = []  # newest steps in a row that weren't ordinary
        self._before: float | None = None  # what a step took under the plan before
        self._fresh = 0  # steps since a start or a change of the plan

    # ------------------------------------------------------------ in

    def replay(self, steps: Iterable[tuple[int, float]]) -> None:
        """Learn again how fast steps are, from the newest ones of the record, oldest first: (step, seconds). They are
        counted in the facts already."""
        kept = self.facts
        for step, seconds in steps:
            self.step(step, seconds)
        self.facts = kept

    def step(self, step: int, seconds: float) -> None:
        """A committed step, and what it took without plans, faults and pauses."""
        if not (math.isfinite(seconds) and seconds > 0):
            return
        self.step_done = step
        self._fresh += 1
        if self._fresh == WARM_UP_STEPS + 1:
            self._forget_recent()
        self._note(hours=self.facts.hours + seconds / _HOUR_SECONDS)
        if self._fresh > WARM_UP_STEPS and not self._is_ordinary(seconds):
            self._exceptions.append(seconds)
            if len(self._exceptions) == LEVEL_STEPS:
                self._take_level()
            return
        self._count_exceptions()
        self._take_recent(seconds)
        if self._fresh > WARM_UP_STEPS:
            self._note(steps=self.facts.steps + 1)

    def plan(self, kind: str, seconds: float) -> None:
        """A plan beside training, and what it took."""
        facts, seconds = self.facts, max(seconds, 0.0)
        known = (*facts.plans.get(kind, ()), seconds)[-NEWEST_PLANS:]
        self._note(plans={**facts.plans, kind: known}, hours=facts.hours + seconds / _HOUR_SECONDS)

    def fault(self, step: int, seconds: float) -> None:
        """The group formed again after a fault, and what that took; the run is now at `step`."""
        facts, seconds = self.facts, max(seconds, 0.0)
        returns, self.step_done = facts.returns + (step < self.step_done), step
        self._note(faults=facts.faults.after(seconds), returns=returns, hours=facts.hours + seconds / _HOUR_SECONDS)

    def change(self) -> None:
        """The plan has changed, so steps may take another time."""
        self._before, self._fresh = self.usual_seconds, 0
        self._forget_recent()
        self._exceptions.clear()

    def _take_recent(self, seconds: float) -> None:
        self._recent.append(seconds)
        insort(self._sorted, seconds)
        if len(self._recent) > RECENT_STEPS:
            del self._sorted[bisect_left(self._sorted, self._recent.popleft())]

    def _forget_recent(self) -> None:
        self._recent.clear()
        self._sorted.clear()

    def _is_ordinary(self, seconds: float) -> bool:
        if not self._recent:
            return True
        ordered = self._sorted
        usual, quarter = ordered[len(ordered) // 2], len(ordered) // 4
        deviation = (ordered[-1 - quarter] - ordered[quarter]) / _QUARTILES
        return abs(seconds - usual) <= max(FARTHEST * usual, FARTHEST_DEVIATIONS * deviation)

    def _count_exceptions(self) -> None:
        """Count the steps before an ordinary one as exceptions."""
        if not self._exceptions:
            return
        long, usual = self.facts.long_steps, self.usual_seconds
        for seconds in self._exceptions:
            long = long.after(seconds / usual - 1) if usual and seconds > usual else long
        self._note(long_steps=long, steps=self.facts.steps + len(self._exceptions))
        self._exceptions.clear()

    def _take_level(self) -> None:
        """All steps take another time now."""
        level = [*self._exceptions]
        self.change()
        for seconds in level:
            self._take_recent(seconds)
        self._fresh = WARM_UP_STEPS + 1

    def _note(self, **changes: object) -> None:
        self.facts = msgspec.structs.replace(self.facts, **changes)

    # ------------------------------------------------------------ out

    @property
    def usual_seconds(self) -> float | None:
        """Median of the newest ordinary steps; None before the first one."""
        return statistics.median(self._sorted) if self._sorted else self._before

    def left(self, schedules: Mapping[str, Schedule]) -> TimeLeft | None:
        """Return the time until the last step and the plans after it, without pauses to come; None before the first
        step, unless its time was predicted."""
        if not self._recent and self._predicted is None:
            return None
        ordinary, facts = self._ordinary_seconds, self.facts
        left = max(self._steps - self.step_done, 0)
        whole = self._ordinary_left(left, ordinary)
        whole = whole.plus(_LONG_STEPS.to_come(facts.long_steps, facts.steps, left), ordinary)
        for kind, schedule in schedules.items():
            whole = whole.plus(self._plans_left(kind, schedule))
        hours = whole.mean / _HOUR_SECONDS
        whole = whole.plus(_FAULTS.to_come(facts.faults, facts.hours, hours))
        # A return makes steps again from anywhere between two checkpoints.
        faults = _FAULTS.count(facts.faults.events, facts.hours, hours)
        returns = _RETURNS.count(facts.returns, facts.faults.events, faults)
        checkpoints = schedules.get("checkpoint", Schedule(0))
        longest = (checkpoints.every_steps or self.step_done) * ordinary
        whole = whole.plus(Moments(returns * longest / 2, returns * longest**2 / 3))
        deviation = math.sqrt(whole.variance)
        return TimeLeft(max(whole.mean - BEST * deviation, 0.0), whole.mean, whole.mean + WORST * deviation)

    @property
    def _ordinary_seconds(self) -> float:
        """Mean of the newest ordinary steps, or as predicted."""
        if self._recent or self._predicted is None:
            return statistics.fmean(self._recent)
        return self._predicted.seconds

    def _ordinary_left(self, left: int, ordinary: float) -> Moments:
        count, part = len(self._recent), left / max(self._steps, 1)
        if not count and self._predicted is not None:
            error = self._predicted.error**2 + DRIFT**2 * part / 3
            return Moments(left * ordinary, (left * ordinary) ** 2 * error)
        scatter = math.sqrt(_variance(self._recent, ordinary)) / ordinary if count >= LEVEL_STEPS else _STEP_SPREAD
        lag = min(count / max(self._steps, 1), 1.0)
        variance = scatter**2 / count + DRIFT**2 * (part + lag) / 3
        mean = left * ordinary
        return Moments(mean, mean**2 * variance)

    def _plans_left(self, kind: str, schedule: Schedule) -> Moments:
        count, known = schedule.left(self.step_done, self._steps), self.facts.plans.get(kind, ())
        each = statistics.fmean(known) if known else schedule.assumed_seconds
        if len(known) > 1:
            variance = _variance(known, each) * len(known) / (len(known) - 1)
            return Moments(count * each, count * variance + count**2 * variance / len(known))
        return Moments(count * each, (count * each * _PLAN_SPREAD / (2 if known else 1)) ** 2)


def _variance(values: Sequence[float], mean: float) -> float:
    return math.dist(values, [mean] * len(values)) ** 2 / len(values)


COPY_BYTES_PER_SECOND: Final = 2e9
"""Speed at which a rank copies its state to main memory, if it wasn't measured: less than one PCIe 3.0 link of a GPU,
or one core, achieves."""


def loop_seconds(state_bytes: float, disk_bytes_per_second: float, *, background: bool) -> float:
    """Seconds of a writer's training loop: with `[checkpoint] background` those of the copy, else those of the write,
    whose copy is part of it."""
    return state_bytes / (COPY_BYTES_PER_SECOND if background else disk_bytes_per_second)
