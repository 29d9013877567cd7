"""Watches each rank's passes, and the sum of gradients between the nodes, against what was calibrated.

A rank whose passes stay slower is throttled, shared or broken. The alert on throughput compares a rank with its own
best in the same run; this one also finds a rank that has been slow from the start.

In the sum a rank also waits for slower ones. The rank that waits least is the last to come, and all its time there is
the sum's own: it counts for the step.
"""

import dataclasses
from collections import deque
from collections.abc import Mapping
from functools import partial
from statistics import median
from typing import Final

from trainctl.node_agent.alerts.conditions import Observation, Said
from trainctl.node_agent.alerts.slow_ranks import machine_facts
from trainctl.protocol.batch.pass_curve import bandwidth, links_of, passes_seconds, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate, ProfileSummary
from trainctl.protocol.config.alert_rules import AlertsTable
from trainctl.protocol.messages import HostReading, RankStep
from trainctl.protocol.messages.event_prose import seconds

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
    """Judges a step's sum once a rank's part of a later step is here."""

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
