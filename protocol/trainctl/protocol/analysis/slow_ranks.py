"""Each rank's speed against its own past, for alerts while it trains and for a diagnosis of its record. Pure."""

import dataclasses
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Final

from trainctl.protocol.analysis.rolling import RECENT_STEPS, RollingStatistics, SlowdownDetector
from trainctl.protocol.messages import BUSY_PHASES, GpuReading, HostReading, RankStep

BLOCK_STEPS: Final = RECENT_STEPS
"""Steps in the block whose median is compared."""
FARTHEST_SHARE: Final = 2.0
"""Largest factor between shares at which rates are compared; beyond it a step's fixed cost would show."""


@dataclasses.dataclass(frozen=True)
class Typical:
    """Medians over a block of one rank's steps, and its machine then; a restart forgets all but the rate."""

    rate: float  # own tokens a second
    plan: tuple[int, int] = (0, 0)  # micro-batch and samples
    parts: tuple[RankStep, ...] = ()
    times: float = 1.0  # its phases, where it stands for a block with another share
    gpu: GpuReading | None = None
    host: HostReading | None = None

    @property
    def busy(self) -> dict[str, float] | None:
        """Return seconds by phase; None if they aren't known."""
        if not self.parts:
            return None
        return {name: self.times * median(getattr(part.phases, name) for part in self.parts) for name in BUSY_PHASES}


class RankPace:
    """One rank's own rate for as long as its micro-batch stays. Another share is another number of passes, which the
    rate hardly depends on: who slows down just after a rebalance is still compared with what it was."""

    def __init__(self) -> None:
        self.plan = (0, 0)  # micro-batch and samples
        self._best: Typical | None = None
        self._recent: deque[RankStep] = deque(maxlen=BLOCK_STEPS)
        self._rates = RollingStatistics(BLOCK_STEPS)  # of these steps, by their count
        self._count = 0
        self._detector, self._learned_plan = SlowdownDetector(), self.plan

    @property
    def is_slow(self) -> bool:
        """Return whether its steps have become longer by more than their scatter explains."""
        return self._detector.is_slow

    @property
    def best(self) -> Typical | None:
        """Return the best block, as it would be with the present share; None before there is one."""
        return _with_share(self._best, self.plan) if self._best is not None else None

    def seed(self, best: Typical) -> None:
        """Compare with what was best before a restart."""
        self._best, self.plan = best, best.plan
        self._detector, self._learned_plan = SlowdownDetector(1 / best.rate), best.plan

    def turn_to(self, plan: tuple[int, int]) -> None:
        """Take a plan's micro-batch and samples: unlike ones are nothing to compare with."""
        if plan != self.plan:
            self.plan, self._count = plan, 0
            self._recent.clear()
            self._rates.clear()
            if self._best is not None and not _is_like(self._best.plan, self.plan):
                self._best = None
            if not _is_like(self._learned_plan, self.plan):
                self._detector, self._learned_plan = SlowdownDetector(), self.plan

    def add(self, part: RankStep) -> None:
        self.turn_to((part.micro_batch or 0, part.samples))
        self._recent.append(part)
        self._count += 1
        rate = part.own_tokens_per_second
        self._rates.add(self._count, rate)
        if rate:
            self._detector.add(_pass_factor(self.plan, self._learned_plan) / rate)

    def now(self, gpu: GpuReading | None = None, host: HostReading | None = None) -> Typical | None:
        """Return the block that ends with the newest step; None before there is one."""
        rate = self._rates.median
        if len(self._recent) < BLOCK_STEPS or rate is None:
            return None
        return Typical(rate, self.plan, tuple(self._recent), 1.0, gpu, host)

    def keep_best(self, typical: Typical) -> None:
        """Call it after each step; every block is a candidate."""
        best = self.best
        if self._count % BLOCK_STEPS == 0 and (best is None or typical.rate > best.rate):
            self._best = typical


def _is_like(before: tuple[int, int], plan: tuple[int, int]) -> bool:
    return before[0] == plan[0] and 1 / FARTHEST_SHARE <= plan[1] / max(before[1], 1) <= FARTHEST_SHARE


def _with_share(best: Typical, plan: tuple[int, int]) -> Typical:
    """Return the block with another share of the same micro-batch. Its last pass may be smaller, and cost as much as a
    whole one: then no more can be asked for than that leaves."""
    if best.plan == plan:
        return best
    factor = _pass_factor(plan, best.plan)
    more = plan[1] / max(best.plan[1], 1) / factor
    return dataclasses.replace(best, rate=best.rate * factor, plan=plan, times=best.times * more)


def _pass_factor(plan: tuple[int, int], before: tuple[int, int]) -> float:
    """Return the expected part that a rate with a plan is of that with the plan before: less for smaller passes."""
    return min(1.0, _pass_samples(plan) / _pass_samples(before))


def _pass_samples(plan: tuple[int, int]) -> float:
    micro_batch, samples = max(plan[0], 1), max(plan[1], 1)
    return samples / -(-samples // micro_batch)


def beyond_others(slower: Mapping[int, float], rank: int) -> float:
    """Return by what part a rank is slower than it was, beyond what most others are too: what slows them all, such as
    longer samples or a busy machine that they share, is no rank's own trouble. `slower`: that part, by rank."""
    others = [part for other, part in slower.items() if other != rank]
    return slower[rank] - max(0.0, median(others) if others else 0.0)
