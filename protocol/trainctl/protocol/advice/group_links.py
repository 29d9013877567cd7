"""What the sum of gradients takes over a group's links: measured ones, else those that are assumed. Pure."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from trainctl.protocol.advice.advice_facts import AdviceFacts
from trainctl.protocol.advice.link_table import ASSUMED_LINK, SAME_MACHINE_BYTES
from trainctl.protocol.batch.against_profile import bandwidth, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate

HANDOVER_SECONDS: Final = 0.004
"""What a sum takes whatever its size: gradients are handed to a process of its own, and back. 3 to 5 ms were measured
on a CPU."""
LOCAL_SUM_BYTES: Final = 1.7e9
"""Bytes per second, each way, that gloo sums within one machine, whatever TCP carries there."""


class GroupLink(NamedTuple):
    """The slowest link of a group."""

    bytes_per_second: float  # each way, both at once
    latency_seconds: float
    measured: bool
    name: str  # for people

    def seconds(self, sum_bytes: float, ranks: int) -> float:
        """What the sum of so many bytes over so many ranks takes, with what each rank does beside it."""
        return HANDOVER_SECONDS + sum_seconds(sum_bytes, ranks, [_rate(self)])


def link_of(facts: AdviceFacts, names: Sequence[str]) -> GroupLink:
    """The slowest of the links between the nodes of a group. Links are measured to the lead's node only; between two
    other nodes the slower of both their links counts."""
    found = [_link(facts, name) for name in names if name != facts.run.lead]
    if on_one_machine(facts, names):
        found = [link for link in found if link.measured] or [_WITHIN]
    return min(found or [_ASSUMED], key=lambda link: link.bytes_per_second)


_WITHIN = GroupLink(SAME_MACHINE_BYTES, 0.0, False, "loopback, not measured")
_ASSUMED = GroupLink(ASSUMED_LINK.bytes_per_second, 0.0, False, f"{ASSUMED_LINK.name}, assumed")


def _link(facts: AdviceFacts, name: str) -> GroupLink:
    known = facts.links.get(name)
    if known is None:
        return _ASSUMED
    rate, described = bandwidth(known), facts.node(name).described
    pair = f"{facts.run.lead}-{name}"
    if on_one_machine(facts, (facts.run.lead, name)):
        rate = min(rate, LOCAL_SUM_BYTES)
    return GroupLink(rate, known.latency_seconds or 0.0, not described, f"{pair}, {described or 'measured'}")


def on_one_machine(facts: AdviceFacts, names: Sequence[str]) -> bool:
    """Whether no gradient crosses a network. False if the machines aren't known."""
    machines = {facts.node(name).machine for name in names}
    return len(machines) == 1 and machines != {""}


def _rate(link: GroupLink) -> LinkRate:
    return LinkRate("", link.bytes_per_second, link.bytes_per_second, link.latency_seconds or None)
