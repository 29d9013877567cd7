"""The pace of one rank: its own rate, the best that it was, and whether it has become slower."""

import dataclasses
from collections import deque
from collections.abc import Mapping

from trainctl.node_agent.alerts.findings import median
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.slowdown import SlowdownDetector

BLOCK_STEPS = 20
"""Steps in the block whose median is compared."""
FARTHEST_SHARE = 2.0
"""Largest factor between shares at which rates are compared; beyond it a step's fixed cost would show."""


@dataclasses.dataclass(frozen=True)
class Typical:
    """Medians over a block of one rank's steps, and its machine then; a restart forgets all but the rate."""

    rate: float  # own tokens a second
    plan: tuple[int, int] = (0, 0)  # micro-batch and samples
    busy: Mapping[str, float] | None = None  # seconds, by phase
    gpu: m.GpuReading | None = None
    host: m.HostReading | None = None


class RankPace:
    """One rank's own rate for as long as its micro-batch stays. Another share is another number of passes, which the
    rate hardly depends on: who slows down just after a rebalance is still compared with what it was."""

    def __init__(self) -> None:
        self.plan = (0, 0)  # micro-batch and samples
        self._best: Typical | None = None
        self._recent: deque[m.RankStep] = deque(maxlen=BLOCK_STEPS)
        self._count = 0
        self._detector, self._learned_plan = SlowdownDetector(), self.plan

    @property
    def is_slow(self) -> bool:
        """Whether its steps have become longer by more than their scatter explains."""
        return self._detector.is_slow

    @property
    def best(self) -> Typical | None:
        """The best block, as it would be with the present share; None before there is one."""
        return _with_share(self._best, self.plan) if self._best is not None else None

    def seed(self, best: Typical) -> None:
        """Compare with what was best before a restart."""
        self._best, self.plan = best, best.plan
        self._detector, self._learned_plan = SlowdownDetector(1 / best.rate), best.plan

    def add(self, part: m.RankStep) -> None:
        if (plan := (part.micro_batch or 0, part.samples)) != self.plan:
            self.plan, self._count = plan, 0
            self._recent.clear()
            if self._best is not None and not _is_like(self._best.plan, self.plan):
                self._best = None
            if not _is_like(self._learned_plan, self.plan):
                self._detector, self._learned_plan = SlowdownDetector(), self.plan
        self._recent.append(part)
        self._count += 1
        if rate := part.own_tokens_per_second:
            self._detector.add(_pass_factor(self.plan, self._learned_plan) / rate)

    def now(self, gpu: m.GpuReading | None, host: m.HostReading | None) -> Typical | None:
        """The block that ends with the newest step; None before there is one."""
        if len(self._recent) < BLOCK_STEPS:
            return None
        rates = [part.own_tokens_per_second for part in self._recent]
        known = [rate for rate in rates if rate is not None]
        if not known:
            return None
        busy = {name: median(getattr(part.phases, name) for part in self._recent) for name in m.BUSY_PHASES}
        return Typical(median(known), self.plan, busy, gpu, host)

    def keep_best(self, typical: Typical) -> None:
        """Call it after each step; every block is a candidate."""
        best = self.best
        if self._count % BLOCK_STEPS == 0 and (best is None or typical.rate > best.rate):
            self._best = typical


def _is_like(before: tuple[int, int], plan: tuple[int, int]) -> bool:
    """Whether a rank's rates with two plans can be compared."""
    return before[0] == plan[0] and 1 / FARTHEST_SHARE <= plan[1] / max(before[1], 1) <= FARTHEST_SHARE


def _with_share(best: Typical, plan: tuple[int, int]) -> Typical:
    """The block with another share of the same micro-batch. Its last pass may be smaller, and cost as much as a whole
    one: then no more can be asked for than that leaves."""
    if best.plan == plan:
        return best
    factor = _pass_factor(plan, best.plan)
    more = plan[1] / max(best.plan[1], 1) / factor
    busy = {name: more * took for name, took in best.busy.items()} if best.busy is not None else None
    return dataclasses.replace(best, rate=best.rate * factor, plan=plan, busy=busy)


def _pass_factor(plan: tuple[int, int], before: tuple[int, int]) -> float:
    """What a rate with a plan is expected to be of the rate with the plan before: less if its passes are smaller."""
    return min(1.0, _pass_samples(plan) / _pass_samples(before))


def _pass_samples(plan: tuple[int, int]) -> float:
    """Samples of a pass in the mean."""
    micro_batch, samples = max(plan[0], 1), max(plan[1], 1)
    return samples / -(-samples // micro_batch)
