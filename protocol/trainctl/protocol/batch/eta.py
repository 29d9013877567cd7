"""The estimate of a run's end: the time until its last step, with its best and worst case. Pure.

The time left is made of what has been measured in the run itself:

    steps    the steps left times the median of the newest ones, times what a step costs on average in such medians:
             that counts the long ones
    plans    the evaluations, checkpoints and other plans that are due, times the mean of the newest ones
    faults   the part of its time that the run has lost to them, with steps that had to be made again

Costs are averaged by blocks of steps: how much blocks differ shows the best and the worst case. A run without a fault
so far isn't taken for one that never has any: it begins with an assumed one.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final

import msgspec

RECENT_STEPS: Final = 256
"""Newest steps whose median counts: more would follow a drift late, fewer would vary by chance."""
WARM_UP_STEPS: Final = 10
"""First steps after a start or a change of the plan that no block counts: devices compile."""
LEVEL_STEPS: Final = 8
"""Steps in a row, all below LOW or all above HIGH times the median, that are the new level. Also a first block."""
LOW, HIGH = 0.5, 1.5
MAX_BLOCKS: Final = 16
"""Number of blocks at which each two become one of twice the steps."""
NEWEST_PLANS: Final = 8
"""Newest plans of a kind whose mean counts."""
BEST, WORST = 1.0, 1.4
"""Distances of the best and the worst case from the mean, in standard errors: with WORST_FAULTS, 92 of 100 simulated
runs end between them. Rare and large costs make the time left skew."""
WORST_FAULTS: Final = 3.0
"""Factor of the faults to come in the worst case; the best has none."""
DRIFT: Final = 0.03
"""Assumed drift of the speed over a whole run, relative."""
_BLOCK_SPREAD: Final = 0.3
"""Assumed standard error of a step's cost, relative, while there are fewer than two blocks."""
_PLAN_SPREAD, _UNSEEN_PLAN_SPREAD = 0.08, 0.5
"""Assumed relative error of the time of a kind of plan that was made, and of one that wasn't yet."""
_FAULT_SECONDS, _FAULT_EVERY_SECONDS = 60.0, 1800.0
"""Assumed fault, before the run's own ones count."""


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


class EtaFacts(msgspec.Struct, frozen=True):
    """The measurements of a run beside its newest steps, kept over restarts of the agent."""

    seconds: float = 0.0  # in which it made steps or recovered
    lost_seconds: float = 0.0  # of these, by faults
    blocks: tuple[float, ...] = ()  # mean cost of a step in each, in medians
    block_steps: int = LEVEL_STEPS
    open_steps: int = 0  # after the last block
    open_cost: float = 0.0  # of these together
    plans: dict[str, tuple[float, ...]] = {}  # seconds of the newest plans of each kind

    def after(self, cost: float) -> "EtaFacts":
        """Return the facts with one step more."""
        steps, total, blocks, size = self.open_steps + 1, self.open_cost + cost, self.blocks, self.block_steps
        if steps == size:
            steps, total, blocks = 0, 0.0, (*blocks, total / size)
        if len(blocks) == MAX_BLOCKS:
            pairs = zip(blocks[::2], blocks[1::2], strict=True)
            blocks, size = tuple(sum(pair) / 2 for pair in pairs), 2 * size
        return msgspec.structs.replace(self, open_steps=steps, open_cost=total, blocks=blocks, block_steps=size)


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
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._fresh = 0  # steps since a start or a change of the plan
        self.usual_seconds: float | None = None
        """Median of the newest steps; None before the first one."""

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
        self.step_done, usual = step, self.usual_seconds or seconds
        self._fresh += 1
        if self._fresh > WARM_UP_STEPS:
            self.facts = self.facts.after(seconds / usual)
        self._count(seconds)
        self._recent.append(seconds)
        newest = [*islice(reversed(self._recent), LEVEL_STEPS)]
        if len(newest) == LEVEL_STEPS and (max(newest) < LOW * usual or min(newest) > HIGH * usual):
            self._recent.clear()
            self._recent.extend(newest)
        self.usual_seconds = statistics.median(self._recent)

    def plan(self, kind: str, seconds: float) -> None:
        """A plan beside training, and what it took."""
        known = (*self.facts.plans.get(kind, ()), max(seconds, 0.0))[-NEWEST_PLANS:]
        self.facts = msgspec.structs.replace(self.facts, plans={**self.facts.plans, kind: known})

    def fault(self, step: int, seconds: float) -> None:
        """The group formed again after a fault, and what that took; the run is now at `step`."""
        again = max(self.step_done - step, 0) * (self.usual_seconds or 0.0)
        self._count(max(seconds, 0.0), max(seconds, 0.0) + again)
        self.step_done = step

    def change(self) -> None:
        """The plan has changed, so steps may take another time."""
        self._fresh = 0
        self._recent.clear()

    def _count(self, seconds: float, lost: float = 0.0) -> None:
        facts = self.facts
        self.facts = msgspec.structs.replace(
            facts, seconds=facts.seconds + seconds, lost_seconds=facts.lost_seconds + lost
        )

    # ------------------------------------------------------------ out

    def left(self, schedules: Mapping[str, Schedule]) -> TimeLeft | None:
        """Return the time until the last step and the plans after it, without pauses to come; None before the first
        step, unless its time was predicted."""
        facts, steps = self.facts, max(self._steps - self.step_done, 0)
        cost, error = _mean_and_error(facts.blocks, steps / facts.block_steps)
        if self.usual_seconds is not None:
            usual = self.usual_seconds
        elif self._predicted is not None:
            usual, error = self._predicted.seconds, self._predicted.error
        else:
            return None
        error = math.hypot(error, DRIFT * math.sqrt(steps / max(self._steps, 1)))
        faults = (facts.lost_seconds + _FAULT_SECONDS) / (facts.seconds + _FAULT_EVERY_SECONDS)
        best = steps * usual * max(cost - BEST * error, 0.0)
        expected = steps * usual * (cost + faults)
        worst = steps * usual * (cost + WORST * error + WORST_FAULTS * faults)
        for kind, schedule in schedules.items():
            known = facts.plans.get(kind, ())
            each = statistics.fmean(known) if known else schedule.assumed_seconds
            seconds = schedule.left(self.step_done, self._steps) * each
            spread = seconds * (_PLAN_SPREAD if known else _UNSEEN_PLAN_SPREAD)
            best, expected, worst = best + seconds - spread, expected + seconds, worst + seconds + spread
        return TimeLeft(best, expected, worst)


def _mean_and_error(blocks: Sequence[float], left: float) -> tuple[float, float]:
    """Return the mean of the blocks, and its standard error as the mean of so many more."""
    count = len(blocks)
    if count < 2:
        return (blocks[0] if blocks else 1.0), _BLOCK_SPREAD
    mean = sum(blocks) / count
    deviation = math.dist(blocks, [mean] * count) / math.sqrt(count - 1)
    return mean, deviation * math.sqrt(1 / count + 1 / max(left, 1.0))


COPY_BYTES_PER_SECOND: Final = 2e9
"""Speed at which a rank copies its state to main memory, if it wasn't measured: less than one PCIe 3.0 link of a GPU,
or one core, achieves."""


def loop_seconds(state_bytes: float, disk_bytes_per_second: float, *, background: bool) -> float:
    """Seconds of a writer's training loop: with `[checkpoint] background` those of the copy, else those of the write,
    whose copy is part of it."""
    return state_bytes / (COPY_BYTES_PER_SECOND if background else disk_bytes_per_second)
