"""The time that the sum of gradients takes over a group's links: measured ones, else those that are assumed. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from trainctl.protocol.advice.advice_facts import AdviceFacts
from trainctl.protocol.batch.against_profile import bandwidth, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate

TCP_PART: Final = 1448 / 1538
"""Part of a link's bit rate that TCP carries with Ethernet frames of 1,500 bytes: 1,448 bytes of 1,538 on the wire."""
_BITS: Final = 8


@dataclass(frozen=True)
class LinkKind:
    """A kind of network."""

    name: str
    bytes_per_second: float  # of a sum, each way
    engine: str = ""  # that it needs, if trainctl doesn't have it


def ethernet(gigabits: float) -> float:
    """Bytes per second, each way, that TCP carries over an Ethernet of this rate."""
    return gigabits * 1e9 / _BITS * TCP_PART


LINKS: Final = (
    LinkKind("1 GbE", ethernet(1)),
    LinkKind("2.5 GbE", ethernet(2.5)),
    LinkKind("10 GbE", ethernet(10)),
    LinkKind("25 GbE", ethernet(25)),
    LinkKind("RDMA over Thunderbolt 5", 80e9 / _BITS, "jaccl"),
)
ASSUMED_LINK: Final = LINKS[0]
"""Between machines whose link wasn't measured."""
SAME_MACHINE_BYTES: Final = 1e9
"""Bytes per second, each way, between nodes of one machine that weren't measured."""


HANDOVER_SECONDS: Final = 0.004
"""Seconds that a sum takes whatever its size: gradients are handed to a process of its own, and back. 3 to 5 ms were
measured on a CPU."""
LOCAL_SUM_BYTES: Final = 1.7e9
"""Bytes per second, each way, that gloo sums within one machine, whatever TCP carries there."""


@dataclass(frozen=True)
class GroupLink:
    """The slowest link of a group."""

    bytes_per_second: float  # each way, both at once
    latency_seconds: float
    measured: bool
    name: str  # for people

    def seconds(self, sum_bytes: float, ranks: int) -> float:
        """Return the seconds that the sum of so many bytes over so many ranks takes, with what each rank does beside
        it."""
        return HANDOVER_SECONDS + sum_seconds(
            sum_bytes, ranks, [LinkRate("", self.bytes_per_second, self.bytes_per_second, self.latency_seconds or None)]
        )


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
    """Return whether no gradient crosses a network. False if the machines aren't known."""
    machines = {facts.node(name).machine for name in names}
    return len(machines) == 1 and machines != {""}
