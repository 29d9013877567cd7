"""Watches the sum of gradients against the calibrated links between the nodes.

A rank also waits in the sum for slower ones. The rank that waits least is the last to come, and all its time there is
the sum's own: it counts for the step.
"""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from trainctl.node_agent.alerts.findings import Finding, Said, median, seconds
from trainctl.protocol import messages as m
from trainctl.protocol.batch.against_profile import bandwidth, links_of, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate, ProfileSummary
from trainctl.protocol.config.alert_rules import AlertsTable

WINDOW_STEPS: Final = 100
"""Steps by whose median the links are judged."""
LOOK_EVERY_STEPS: Final = 20
"""Steps between two looks."""
LEAST_SECONDS: Final = 0.005
"""Expected time of a sum below which nothing is said: it is mostly fixed costs."""
CLEAR_TIMES: Final = 1.2
"""Factor over the threshold from which the links are well."""


class _Sum(NamedTuple):
    """Of one step, in seconds."""

    took: float
    expected: float


class LinkWatch:
    """Takes ranks' parts as they come; a step is judged once a part of a later one is here."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._step = 0
        self._parts: dict[int, m.RankStep] = {}  # of that step, by rank
        self._sums: deque[_Sum] = deque(maxlen=WINDOW_STEPS)

    def part(
        self, part: m.RankStep, profiles: Mapping[str, ProfileSummary], lead: str, hosts: Mapping[str, m.HostReading]
    ) -> list[Finding]:
        """A rank's part of a step. `profiles` and `hosts`: calibrations and newest readings by node."""
        found: list[Finding] = []
        if part.step != self._step:
            found = self._judge(profiles, lead, hosts)
            self._step, self._parts = part.step, {}
        self._parts[part.rank] = part
        return found

    def clear(self) -> None:
        """Another group sums from here on."""
        self._sums.clear()
        self._parts.clear()

    def _judge(
        self, profiles: Mapping[str, ProfileSummary], lead: str, hosts: Mapping[str, m.HostReading]
    ) -> list[Finding]:
        parts = [*self._parts.values()]
        others = {part.node for part in parts} - {lead}
        known = links_of(profiles, lead)
        links = {node: known[node] for node in sorted(others) if node in known}
        size = max((part.values.get("sum_bytes", 0.0) for part in parts), default=0.0)
        if not size or not others or len(links) < len(others):
            return []
        took, expected = min(part.phases.sync for part in parts), sum_seconds(size, len(parts), links.values())
        if took <= 0 or expected < LEAST_SECONDS:
            return []
        self._sums.append(_Sum(took, expected))
        if len(self._sums) < WINDOW_STEPS or self._step % LOOK_EVERY_STEPS:
            return []
        return [self._finding(links, hosts)]

    def _finding(self, links: Mapping[str, LinkRate], hosts: Mapping[str, m.HostReading]) -> Finding:
        part, least = median(one.expected / one.took for one in self._sums), self._table.link_percent / 100
        say = partial(_say, part, [*self._sums], links, hosts)
        # A ring is as fast as its slowest link: with several, the sum alone doesn't tell which one that is.
        node = next(iter(links)) if len(links) == 1 else ""
        return Finding("link", part < least, part > CLEAR_TIMES * least, say, node)


def _say(part: float, sums: list[_Sum], links: Mapping[str, LinkRate], hosts: Mapping[str, m.HostReading]) -> Said:
    took, expected = median(one.took for one in sums), median(one.expected for one in sums)
    which = "the link to the lead is" if len(links) == 1 else "the links between the nodes are"
    text = (
        f"{which} at {100 * part:.0f} % of the calibrated bandwidth: a sum takes {seconds(took)}, not"
        f" {seconds(expected)}"
    )
    each = [_link(node, link, hosts.get(node)) for node, link in links.items()]
    advice = "look for other traffic, Wi-Fi instead of a cable, and the interface that the ranks use"
    return Said(text, (f"median of the last {WINDOW_STEPS} sums", *each, advice))


def _link(node: str, link: LinkRate, host: m.HostReading | None) -> str:
    """What was calibrated, and the round trip now."""
    now = host.values.get("round_trip_seconds") if host is not None else None
    trips = [f"{1000 * link.latency_seconds:.1f} ms then"] if link.latency_seconds is not None else []
    trips += [f"{1000 * now:.1f} ms now"] if now is not None else []
    trip = f", round trip {', '.join(trips)}" if trips else ""
    return f"{node}: {bandwidth(link) / 1e6:.0f} MB/s when calibrated{trip}"
