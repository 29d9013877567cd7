"""Watches each rank's speed against its own past (its rate, the phase that grew, its device's clock under load) and
against its calibration, and the sum of gradients against the calibrated links.

A rank whose passes stay slower is throttled, shared or broken. The alert on throughput compares a rank with its own
best in the same run; the one on efficiency also finds a rank that has been slow from the start.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median, median_low
from typing import Final

from trainctl.node_agent.alerts.conditions import Observation, Said, arrow, gigahertz, limited_by
from trainctl.protocol.analysis.slow_ranks import RankPace, Typical, beyond_others
from trainctl.protocol.batch.pass_curve import bandwidth, links_of, passes_seconds, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate, ProfileSummary
from trainctl.protocol.config.alert_rules import LOADED_PERCENT, AlertsTable
from trainctl.protocol.messages import BUSY_PHASES, GpuReading, HostReading, RankStep
from trainctl.protocol.messages.event_prose import seconds

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


# ---------------------------------------------------------------- against the calibration

WINDOW_STEPS: Final = 100
"""Steps by whose median a rank is judged."""
LOOK_EVERY_STEPS: Final = 20
"""Steps between two looks at a rank."""
CLEAR_PART: Final = 0.5
"""Part of the threshold below which a rank is as fast as it was."""
MIN_SUM_SECONDS: Final = 0.005
"""Expected time of a sum below which nothing is said: it is mostly fixed costs."""
LINK_CLEAR_TIMES: Final = 1.2
"""Factor over the threshold from which the links are well."""


@dataclasses.dataclass(frozen=True)
class _Timed:
    """Seconds that a part of one step took, and those expected from the calibration."""

    took: float
    expected: float


class CalibratedSpeedWatch:
    """Judges ranks' parts of steps."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._steps: dict[int, deque[_Timed]] = {}

    def part(self, part: RankStep, profile: ProfileSummary | None, host: HostReading | None) -> list[Observation]:
        """Judge a rank's part of a step by its calibration; `host` is what was last read of its machine."""
        expected = passes_seconds(part, profile) if profile is not None else None
        took = part.phases.forward + part.phases.backward
        if expected is None or took <= 0:
            return []
        kept = self._steps.setdefault(part.rank, deque(maxlen=WINDOW_STEPS))
        kept.append(_Timed(took, expected))
        if len(kept) < WINDOW_STEPS or (part.step + part.rank) % LOOK_EVERY_STEPS:
            return []
        slower, most = (
            median(step.took / step.expected for step in kept) - 1,
            self._table.calibrated_slower_percent / 100,
        )
        say = partial(_say_passes, slower, [*kept], part, host)
        return [Observation("efficiency", slower > most, slower < CLEAR_PART * most, say, part.node, part.rank)]

    def forget(self, rank: int) -> None:
        """Drop the steps of a rank that is out, or gone."""
        self._steps.pop(rank, None)


def _say_passes(slower: float, kept: list[_Timed], part: RankStep, host: HostReading | None) -> Said:
    took, expected = median(step.took for step in kept), median(step.expected for step in kept)
    text = f"{100 * slower:.0f} % slower than calibrated: passes take {seconds(took)}, not {seconds(expected)}"
    samples = f"{part.samples} samples with a micro-batch of {part.micro_batch}"
    advice = "look for other programs, a lower clock and heat; trainctl calibrate measures the device again"
    return Said(text, (f"median of the last {WINDOW_STEPS} steps; {samples}", *machine_facts(None, host)), (advice,))


class LinkWatch:
    """Judges a step's sum once a rank's part of a later step is here.

    In the sum a rank also waits for slower ones. The rank that waits least is the last to come, and all its time there
    is the sum's own: it counts for the step.
    """

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._step = 0
        self._parts: dict[int, RankStep] = {}  # of that step, by rank
        self._sums: deque[_Timed] = deque(maxlen=WINDOW_STEPS)

    def part(
        self, part: RankStep, profiles: Mapping[str, ProfileSummary], lead: str, hosts: Mapping[str, HostReading]
    ) -> list[Observation]:
        """Take a rank's part of a step. `profiles` and `hosts`: calibrations and newest readings by node."""
        findings: list[Observation] = []
        if part.step != self._step:
            findings = self._judge(profiles, lead, hosts)
            self._step, self._parts = part.step, {}
        self._parts[part.rank] = part
        return findings

    def clear(self) -> None:
        """Forget the sums: another group sums from here on."""
        self._sums.clear()
        self._parts.clear()

    def _judge(
        self, profiles: Mapping[str, ProfileSummary], lead: str, hosts: Mapping[str, HostReading]
    ) -> list[Observation]:
        parts = [*self._parts.values()]
        others = {part.node for part in parts} - {lead}
        rates = links_of(profiles, lead)
        links = {node: rates[node] for node in sorted(others) if node in rates}
        size = max((part.values.get("sum_bytes", 0.0) for part in parts), default=0.0)
        if not size or not others or len(links) < len(others):
            return []
        took, expected = min(part.phases.sync for part in parts), sum_seconds(size, len(parts), links.values())
        if took <= 0 or expected < MIN_SUM_SECONDS:
            return []
        self._sums.append(_Timed(took, expected))
        if len(self._sums) < WINDOW_STEPS or self._step % LOOK_EVERY_STEPS:
            return []
        return [self._finding(links, hosts)]

    def _finding(self, links: Mapping[str, LinkRate], hosts: Mapping[str, HostReading]) -> Observation:
        part, least = median(step.expected / step.took for step in self._sums), self._table.link_percent / 100
        say = partial(_say_sum, part, [*self._sums], links, hosts)
        # A ring is as fast as its slowest link: with several, the sum alone doesn't tell which one that is.
        node = next(iter(links)) if len(links) == 1 else ""
        return Observation("link", part < least, part > LINK_CLEAR_TIMES * least, say, node)


def _say_sum(part: float, sums: list[_Timed], links: Mapping[str, LinkRate], hosts: Mapping[str, HostReading]) -> Said:
    took, expected = median(step.took for step in sums), median(step.expected for step in sums)
    which = "the link to the lead is" if len(links) == 1 else "the links between the nodes are"
    text = (
        f"{which} at {100 * part:.0f} % of the calibrated bandwidth: a sum takes {seconds(took)}, not"
        f" {seconds(expected)}"
    )
    each = [_link(node, link, hosts.get(node)) for node, link in links.items()]
    advice = "look for other traffic, Wi-Fi instead of a cable, and the interface that the ranks use"
    return Said(text, (f"median of the last {WINDOW_STEPS} sums", *each), (advice,))


def _link(node: str, link: LinkRate, host: HostReading | None) -> str:
    now = host.values.get("round_trip_seconds") if host is not None else None
    trips = [f"{1000 * link.latency_seconds:.1f} ms then"] if link.latency_seconds is not None else []
    trips += [f"{1000 * now:.1f} ms now"] if now is not None else []
    trip = f", round trip {', '.join(trips)}" if trips else ""
    return f"{node}: {bandwidth(link) / 1e6:.0f} MB/s when calibrated{trip}"
