"""Watches each rank's speed against its own past: its own rate, the phase that grew, its device's clock under load."""

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median_low
from typing import NamedTuple

from trainctl.node_agent.alerts.findings import Finding, Said, arrow, gigahertz, limited_by, median, seconds
from trainctl.node_agent.alerts.rank_pace import RankPace, Typical
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

BLOCK_READINGS, RECENT_READINGS = 60, 15
"""Readings at 1 Hz whose median is a clock's best rate, and its rate now."""
LOADED_PERCENT = 50.0
"""Percent of use above which a device counts as loaded; a less used one may lower its clock."""


class PaceWatch:
    """Own rates of all ranks and clocks of their devices."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._paces: dict[int, RankPace] = {}
        self._clocks: dict[int, _Clock] = {}
        self._typical: dict[int, Typical] = {}
        self._slower: dict[int, float] = {}  # the part by which each is below its best
        self._nodes: dict[int, str] = {}

    def part(self, part: m.RankStep, host: m.HostReading | None, device: str | None) -> list[Finding]:
        """A rank's part of a step, with what was last read of its machine: what it says of the rank, and of all."""
        self._nodes[part.rank] = part.node
        alone = self._of_rank(part, host, device)
        once = part.rank == max(self._slower, default=part.rank)  # of all ranks at a step
        return [*alone, self._together()] if alone and once else alone

    def _of_rank(self, part: m.RankStep, host: m.HostReading | None, device: str | None) -> list[Finding]:
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
            return [Finding("throughput", False, True, lambda: Said(""), part.node, part.rank)]
        self._slower[part.rank] = 1 - typical.rate / best.rate
        judged = self._judged(self._alone(part.rank), is_slow=pace.is_slow)
        return [Finding("throughput", *judged, lambda: _slower(best, typical), part.node, part.rank)]

    def _judged(self, slower: float, *, is_slow: bool) -> tuple[bool, bool]:
        """Whether it is bad and whether it is good; what is no slowdown by its scatter is good."""
        table = self._table
        is_bad = is_slow and slower > table.throughput_drop_percent / 100
        return is_bad, not is_slow or slower < table.throughput_clear_percent / 100

    def _alone(self, rank: int) -> float:
        """By how much a rank is slower beyond what the others are too: what slows most of them is no rank's own
        trouble, such as a busy machine that they share."""
        others = [slower for other, slower in self._slower.items() if other != rank]
        return self._slower[rank] - max(0.0, median(others) if others else 0.0)

    def _together(self) -> Finding:
        """What slows more than half of the ranks is the fleet's trouble, and no rank's own."""
        slower = dict(self._slower) if len(self._slower) > 1 else {}
        middle = median_low(slower.values()) if slower else 0.0
        are_slow = 2 * sum(self._paces[rank].is_slow for rank in slower) > len(slower)
        return Finding(
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

    def reading(self, reading: m.HostReading, ranks: Mapping[int, str | None]) -> list[Finding]:
        """A machine's reading, with the devices of the ranks that are at work on it."""
        found = []
        for rank, device in ranks.items():
            gpu = reading.gpu_of(device)
            if gpu is None or gpu.clock_mhz is None or (gpu.utilization_percent or 100.0) < LOADED_PERCENT:
                continue
            clock = self._clocks.setdefault(rank, _Clock())
            lower = clock.add(gpu.clock_mhz)
            if lower is None:
                continue
            bad, good = lower > self._table.clock_drop_percent / 100, lower < self._table.clock_clear_percent / 100
            say = self._speaker(rank, _Read(gpu, reading), clock.best, clock.now)
            found.append(Finding("clock", bad, good, say, reading.node, rank))
        return found

    def _speaker(self, rank: int, read: "_Read", best_mhz: float, now_mhz: float) -> Callable[[], Said]:
        pace, typical = self._paces.get(rank), self._typical.get(rank)
        return partial(_lower_clock, pace.best if pace is not None else None, typical, read, best_mhz, now_mhz)

    def forget(self, rank: int) -> None:
        """A rank that is out, or gone: what comes after is compared with nothing before."""
        for known in (self._paces, self._clocks, self._typical, self._slower, self._nodes):
            known.pop(rank, None)

    # ------------------------------------------------------------ what a restart must not forget

    def reference(self, kind: str, rank: int) -> tuple[float, ...]:
        """What a rank is compared with, for `seed`."""
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
        """The part by which it is lower than at its best; None before that is known."""
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


class _Read(NamedTuple):
    gpu: m.GpuReading | None = None
    host: m.HostReading | None = None


def _lower_clock(before: Typical | None, now: Typical | None, read: _Read, best_mhz: float, now_mhz: float) -> Said:
    """Says what a lower clock does: `+142 ms in backward: 84 °C, 1.62→1.38 GHz`."""
    grew = _grown(before, now)
    state = [_celsius(read), f"{arrow(gigahertz(best_mhz), gigahertz(now_mhz))} GHz", limited_by(read.gpu)]
    words = ", ".join(word for word in state if word)
    facts = _facts(before, now) if before and now else _machine_facts(read)
    return Said(f"{grew}: {words}" if grew else f"clock under load: {words}", facts)


def _slower(best: Typical, typical: Typical) -> Said:
    rates = _rates(best, typical)
    grew, read = _grown(best, typical), _Read(typical.gpu, typical.host)
    clock = ""
    if best.gpu and typical.gpu and best.gpu.clock_mhz and typical.gpu.clock_mhz:
        clock = f"{arrow(gigahertz(best.gpu.clock_mhz), gigahertz(typical.gpu.clock_mhz))} GHz"
    state = ", ".join(word for word in (_celsius(read), clock) if word)
    text = f"{grew}: {state}" if grew and state else f"{grew}, {rates}" if grew else rates
    return Said(text, (rates, *_facts(best, typical)))


def _rates(best: Typical, typical: Typical) -> str:
    percent = 100 * (typical.rate / best.rate - 1)
    return f"own rate {best.rate:,.0f}→{typical.rate:,.0f} tok/s ({percent:+.0f} %)"


def _grown(before: Typical | None, now: Typical | None) -> str:
    """The phase that grew most, and by how much."""
    if before is None or now is None or before.busy is None or now.busy is None:
        return ""
    grew = {name: now.busy[name] - before.busy[name] for name in m.BUSY_PHASES}
    phase = max(grew, key=lambda name: grew[name])
    return f"+{seconds(grew[phase])} in {phase}" if grew[phase] >= 0.0005 else ""


def _celsius(read: _Read) -> str:
    value = read.gpu.temperature_celsius if read.gpu is not None else None
    value = value if value is not None or read.host is None else read.host.temperature_celsius
    return f"{value:.0f} °C" if value is not None else ""


def _facts(before: Typical, now: Typical) -> tuple[str, ...]:
    facts = []
    if before.busy and now.busy:
        phases = [f"{name} {arrow(seconds(before.busy[name]), seconds(now.busy[name]))}" for name in m.BUSY_PHASES]
        facts = [", ".join(phases)]
    return (*facts, *_machine_facts(_Read(now.gpu, now.host)))


def _machine_facts(read: _Read) -> tuple[str, ...]:
    facts = []
    gpu, host = read.gpu, read.host
    if gpu is not None:
        parts = [f"{gpu.utilization_percent:.0f} % used"] if gpu.utilization_percent is not None else []
        parts += [f"{gigahertz(gpu.clock_mhz)} GHz"] if gpu.clock_mhz is not None else []
        parts += [f"{gpu.power_watts:.0f} W"] if gpu.power_watts is not None else []
        parts += [_celsius(read)] if _celsius(read) else []
        facts += [f"{gpu.name}: {', '.join(parts)}"] if parts else []
    if host is not None:
        parts = [f"cpu {host.cpu_percent:.0f} %"] if host.cpu_percent is not None else []
        parts += [f"load {host.load_1min:.1f}"] if host.load_1min is not None else []
        parts += [f"{host.temperature_celsius:.0f} °C"] if host.temperature_celsius is not None else []
        facts += [f"{host.node}: {', '.join(parts)}"] if parts else []
    return tuple(facts)
