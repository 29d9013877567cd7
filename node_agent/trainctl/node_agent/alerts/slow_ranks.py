"""Watches each rank's speed against its own past: its own rate, the phase that grew, its device's clock under load."""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median, median_low

from trainctl.node_agent.alerts.conditions import Observation, Said, arrow, gigahertz, limited_by
from trainctl.protocol.analysis.rolling import RECENT_STEPS, RollingStatistics, SlowdownDetector, beyond_others
from trainctl.protocol.config.alert_rules import LOADED_PERCENT, AlertsTable
from trainctl.protocol.messages import BUSY_PHASES, GpuReading, HostReading, RankStep
from trainctl.protocol.messages.event_prose import seconds

BLOCK_STEPS = RECENT_STEPS
"""Steps in the block whose median is compared."""
FARTHEST_SHARE = 2.0
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

    def add(self, part: RankStep) -> None:
        if (plan := (part.micro_batch or 0, part.samples)) != self.plan:
            self.plan, self._count = plan, 0
            self._recent.clear()
            self._rates.clear()
            if self._best is not None and not _is_like(self._best.plan, self.plan):
                self._best = None
            if not _is_like(self._learned_plan, self.plan):
                self._detector, self._learned_plan = SlowdownDetector(), self.plan
        self._recent.append(part)
        self._count += 1
        rate = part.own_tokens_per_second
        self._rates.add(self._count, rate)
        if rate:
            self._detector.add(_pass_factor(self.plan, self._learned_plan) / rate)

    def now(self, gpu: GpuReading | None, host: HostReading | None) -> Typical | None:
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


BLOCK_READINGS, RECENT_READINGS = 60, 15
"""Readings at 1 Hz whose median is a clock's best rate, and its rate now."""


class PaceWatch:
    """Judges the own rates of all ranks and the clocks of their devices."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._paces: dict[int, RankPace] = {}
        self._clocks: dict[int, _Clock] = {}
        self._typical: dict[int, Typical] = {}
        self._slower: dict[int, float] = {}  # the part by which each is below its best
        self._nodes: dict[int, str] = {}

    def part(self, part: RankStep, host: HostReading | None, device: str | None) -> list[Observation]:
        """Judge a rank, and all of them, by its part of a step; `host` is what was last read of its machine."""
        self._nodes[part.rank] = part.node
        alone = self._of_rank(part, host, device)
        once = part.rank == max(self._slower, default=part.rank)  # of all ranks at a step
        return [*alone, self._together()] if alone and once else alone

    def _of_rank(self, part: RankStep, host: HostReading | None, device: str | None) -> list[Observation]:
        pace = self._paces.setdefault(part.rank, RankPace())
        pace.add(part)
        typical = pace.now(host.gpu_of(device) if host is not None else None, host)
        if typical is None:
            return []
        self._typical[part.rank] = typical
        best = pace.best
        pace.keep_best(typical)
        if best is None:
            self._slower.pop(part.rank, None)
            # With another micro-batch, or quite another share, there is nothing to be slower than.
            return [Observation("throughput", False, True, lambda: Said(""), part.node, part.rank)]
        self._slower[part.rank] = 1 - typical.rate / best.rate
        judged = self._judged(beyond_others(self._slower, part.rank), is_slow=pace.is_slow)
        return [Observation("throughput", *judged, lambda: _slower(best, typical), part.node, part.rank)]

    def _judged(self, slower: float, *, is_slow: bool) -> tuple[bool, bool]:
        """Return whether it is bad and whether it is good; what is no slowdown by its scatter is good."""
        table = self._table
        is_bad = is_slow and slower > table.throughput_drop_percent / 100
        return is_bad, not is_slow or slower < table.throughput_clear_percent / 100

    def _together(self) -> Observation:
        """Judge all ranks: what slows more than half of them is the fleet's trouble, and no rank's own."""
        slower = dict(self._slower) if len(self._slower) > 1 else {}
        middle = median_low(slower.values()) if slower else 0.0
        are_slow = 2 * sum(self._paces[rank].is_slow for rank in slower) > len(slower)
        return Observation(
            "throughput", *self._judged(middle, is_slow=are_slow), lambda: self._say_together(slower, middle)
        )

    def _say_together(self, slower: Mapping[int, float], middle: float) -> Said:
        lower = sum(part > self._table.throughput_drop_percent / 100 for part in slower.values())
        text = f"{lower} of {len(slower)} ranks slowed down together; median own rate -{100 * middle:.0f} %"
        return Said(text, tuple(self._rates_of(rank) for rank in sorted(slower) if rank in self._slower))

    def _rates_of(self, rank: int) -> str:
        best, now = self._paces[rank].best, self._typical[rank]
        rates = _rates(best, now) if best is not None else "measuring its rate again"
        return f"{self._nodes[rank]} rank {rank}: {rates}"

    def reading(self, reading: HostReading, ranks: Mapping[int, str | None]) -> list[Observation]:
        """Judge a machine's reading; `ranks` has the devices of the ranks that are at work on it."""
        findings = []
        for rank, device in ranks.items():
            gpu = reading.gpu_of(device)
            if gpu is None or gpu.clock_mhz is None or (gpu.utilization_percent or 100.0) < LOADED_PERCENT:
                continue
            clock = self._clocks.setdefault(rank, _Clock())
            lower = clock.add(gpu.clock_mhz)
            if lower is None:
                continue
            bad, good = lower > self._table.clock_drop_percent / 100, lower < self._table.clock_clear_percent / 100
            say = self._speaker(rank, gpu, reading, clock)
            findings.append(Observation("clock", bad, good, say, reading.node, rank))
        return findings

    def _speaker(self, rank: int, gpu: GpuReading, host: HostReading, clock: "_Clock") -> Callable[[], Said]:
        pace, typical = self._paces.get(rank), self._typical.get(rank)
        return partial(
            _lower_clock,
            pace.best if pace is not None else None,
            typical,
            gpu,
            host,
            arrow(gigahertz(clock.best), gigahertz(clock.now)),
        )

    def forget(self, rank: int) -> None:
        """Drop a rank that is out, or gone: what comes after is compared with nothing before."""
        for by_rank in (self._paces, self._clocks, self._typical, self._slower, self._nodes):
            by_rank.pop(rank, None)

    # ------------------------------------------------------------ what a restart must not forget

    def reference(self, kind: str, rank: int) -> tuple[float, ...]:
        """Return what a rank is compared with, for `seed`."""
        pace, clock = self._paces.get(rank), self._clocks.get(rank)
        if kind == "throughput" and pace is not None and pace.best is not None:
            return pace.best.rate, *map(float, pace.plan)
        return (clock.best,) if kind == "clock" and clock is not None else ()

    def seed(self, kind: str, rank: int, reference: tuple[float, ...]) -> None:
        """Compare a rank with what it was compared with before."""
        if kind == "throughput" and len(reference) == 3:
            best = Typical(reference[0], (int(reference[1]), int(reference[2])))
            self._paces.setdefault(rank, RankPace()).seed(best)
        elif kind == "clock" and len(reference) == 1:
            self._clocks.setdefault(rank, _Clock()).best = reference[0]


class _Clock:
    """One device's clock under load, in MHz."""

    def __init__(self) -> None:
        self.best, self.now = 0.0, 0.0
        self._block: deque[float] = deque(maxlen=BLOCK_READINGS)
        self._count = 0

    def add(self, mhz: float) -> float | None:
        """Return the part by which it is lower than at its best; None before that is known."""
        self._block.append(mhz)
        self._count += 1
        recent = list(self._block)[-RECENT_READINGS:]
        lower = None
        if self.best and len(recent) == RECENT_READINGS:
            self.now = median(recent)
            lower = 1 - self.now / self.best
        if self._count % BLOCK_READINGS == 0:
            self.best = max(self.best, median(self._block))
        return lower


def _lower_clock(before: Typical | None, now: Typical | None, gpu: GpuReading, host: HostReading, clock: str) -> Said:
    """Say what a lower clock does: `+0.14 s in backward: 84 °C, 1.62→1.38 GHz`."""
    grew = _grown(before, now)
    state = [_heat(gpu, host), f"{clock} GHz", limited_by(gpu)]
    words = ", ".join(word for word in state if word)
    facts = _facts(before, now) if before and now else machine_facts(gpu, host)
    return Said(f"{grew}: {words}" if grew else f"clock under load: {words}", facts)


def _slower(best: Typical, typical: Typical) -> Said:
    rates = _rates(best, typical)
    grew, clock = _grown(best, typical), ""
    if best.gpu and typical.gpu and best.gpu.clock_mhz and typical.gpu.clock_mhz:
        clock = f"{arrow(gigahertz(best.gpu.clock_mhz), gigahertz(typical.gpu.clock_mhz))} GHz"
    state = ", ".join(word for word in (_heat(typical.gpu, typical.host), clock) if word)
    text = f"{grew}: {state}" if grew and state else f"{grew}, {rates}" if grew else rates
    return Said(text, (rates, *_facts(best, typical)))


def _rates(best: Typical, typical: Typical) -> str:
    percent = 100 * (typical.rate / best.rate - 1)
    return f"own rate {best.rate:,.0f}→{typical.rate:,.0f} tok/s ({percent:+.0f} %)"


def _grown(before: Typical | None, now: Typical | None) -> str:
    was, took = before.busy if before else None, now.busy if now else None
    if was is None or took is None:
        return ""
    grew = {name: took[name] - was[name] for name in BUSY_PHASES}
    phase = max(grew, key=lambda name: grew[name])
    return f"+{seconds(grew[phase])} in {phase}" if grew[phase] >= 0.0005 else ""


def _celsius(gpu: GpuReading | None, host: HostReading | None) -> float | None:
    value = gpu.temperature_celsius if gpu is not None else None
    return host.temperature_celsius if value is None and host is not None else value


def _heat(gpu: GpuReading | None, host: HostReading | None) -> str:
    value = _celsius(gpu, host)
    return f"{value:.0f} °C" if value is not None else ""


def _facts(before: Typical, now: Typical) -> tuple[str, ...]:
    facts = []
    was, took = before.busy, now.busy
    if was and took:
        facts = [", ".join(f"{name} {arrow(seconds(was[name]), seconds(took[name]))}" for name in BUSY_PHASES)]
    return (*facts, *machine_facts(now.gpu, now.host))


def machine_facts(gpu: GpuReading | None, host: HostReading | None) -> tuple[str, ...]:
    """Return a line on a device and one on its machine, of what was read."""
    facts = []
    if gpu is not None:
        clock_ghz = gpu.clock_mhz / 1000 if gpu.clock_mhz is not None else None
        parts = [("{:.0f} % used", gpu.utilization_percent), ("{:.2f} GHz", clock_ghz), ("{:.0f} W", gpu.power_watts)]
        facts.append((gpu.name, [*parts, ("{:.0f} °C", _celsius(gpu, host))]))
    if host is not None:
        parts = [("cpu {:.0f} %", host.cpu_percent), ("load {:.1f}", host.load_1min)]
        facts.append((host.node, [*parts, ("{:.0f} °C", host.temperature_celsius)]))
    known = {name: [words.format(value) for words, value in parts if value is not None] for name, parts in facts}
    return tuple(f"{name}: {', '.join(words)}" for name, words in known.items() if words)
