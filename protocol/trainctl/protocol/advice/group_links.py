"""The links of a group: the time that the sum of gradients takes over those measured or assumed, and the settings that
MLX's engine jaccl would need for Macs (RDMA over Thunderbolt 5). Pure.

trainctl refuses that engine until it has been tried on Macs; `trainctl doctor` shows the settings. Source: MLX's
documentation of distributed communication and of `mlx.launch`, version 0.32. Its script `mlx.distributed_config` gives
each cable a network of two addresses. Such networks are what is looked for here.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Interface, IPv4Network
from typing import Final, Literal

from trainctl.protocol.advice.advice_facts import AdviceFacts
from trainctl.protocol.batch.pass_curve import bandwidth, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate
from trainctl.protocol.errors import InvalidInputError

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


PORT: Final = 32323
"""TCP port of the first rank, by which all ranks exchange their RDMA addresses: that of `mlx.launch`."""
_CABLE_PREFIX: Final = 30
"""Least prefix length of a network that has only two hosts."""

Devices = tuple[tuple[tuple[str, ...], ...], ...]
Cables = Mapping[tuple[str, str], Sequence[str]]


@dataclass(frozen=True)
class JacclNode:
    """A node of the group. The first one has rank 0."""

    name: str
    interface: str  # of [nodes.NAME] in the run file; the first node's is that of the coordinator; empty: any
    addresses: Mapping[str, Sequence[str]]  # of each interface that is up: IPv4 addresses with prefix length


@dataclass(frozen=True)
class JacclSettings:
    """The settings that MLX reads from the environment of each rank, beside its number."""

    devices: Devices  # [from rank][to rank]: RDMA devices, one for each cable; none to itself
    coordinator: str  # MLX_JACCL_COORDINATOR: address and port at which rank 0 listens
    topology: Literal["mesh", "ring"]  # ring: MLX_JACCL_RING=1

    def devices_json(self) -> str:
        """The file that MLX_IBV_DEVICES names: null, a name, or a list of names for each pair of ranks."""
        return json.dumps([[_json(names) for names in row] for row in self.devices])


def jaccl_settings(nodes: Sequence[JacclNode], port: int = PORT) -> JacclSettings:
    """A mesh if each pair of nodes has a cable, else a ring in the order of the nodes. Raises InvalidInputError that
    names the nodes that lack a cable, or the first node if it has no address that all can reach."""
    cables = cables_of(nodes)
    names = [node.name for node in nodes]
    pairs = [(one, other) for place, one in enumerate(names) for other in names[place + 1 :]]
    neighbours = list(zip(names, names[1:] + names[:1], strict=True))
    lacking = [pair for pair in pairs if not cables.get(pair)]
    topology: Literal["mesh", "ring"] = "ring" if lacking else "mesh"
    if len(names) < 2:
        raise InvalidInputError("jaccl", "one node has no other to be joined to")
    if lacking and not all(cables.get(pair) for pair in neighbours):
        said = ", ".join(f"{one} and {other}" for one, other in lacking)
        raise InvalidInputError("jaccl", f"no Thunderbolt network of two addresses joins {said}")
    used = pairs if topology == "mesh" else neighbours
    count = min(len(cables[pair]) for pair in used)
    linked = {*used, *((other, one) for one, other in used)}
    devices = tuple(
        tuple(_devices(cables, (one, other), count) if (one, other) in linked else () for other in names)
        for one in names
    )
    return JacclSettings(devices, f"{_coordinator(nodes[0])}:{port}", topology)


def cables_of(nodes: Sequence[JacclNode]) -> Cables:
    """The first node's interfaces to the second, by pair of names, in both orders: those in a network of two addresses
    that is on no other node. The order is that of the networks, so it is the same at both ends."""
    places = defaultdict[IPv4Network, list[tuple[str, str]]](list)
    for node in nodes:
        for interface, addresses in node.addresses.items():
            for network in {IPv4Interface(address).network for address in addresses}:
                if network.prefixlen >= _CABLE_PREFIX and not network.is_loopback:
                    places[network].append((node.name, interface))
    cables = defaultdict[tuple[str, str], list[str]](list)
    for _, ends in sorted(places.items()):
        if len(ends) == 2 and ends[0][0] != ends[1][0]:
            (one, interface), (other, opposite) = ends
            cables[one, other].append(interface)
            cables[other, one].append(opposite)
    return cables


def _devices(cables: Cables, pair: tuple[str, str], count: int) -> tuple[str, ...]:
    """macOS names the RDMA device of interface en5 rdma_en5."""
    return tuple(f"rdma_{interface}" for interface in cables[pair][:count])


def _coordinator(first: JacclNode) -> str:
    """Return where rank 0 listens: TCP, which need not use a Thunderbolt cable."""
    chosen = [first.interface] if first.interface else sorted(first.addresses)
    found = [IPv4Interface(address) for name in chosen for address in first.addresses.get(name, ())]
    usable = [one for one in found if not one.is_loopback]
    if not usable:
        problem = f"{first.name}, which has rank 0, has no IPv4 address on {first.interface or 'any interface'}"
        raise InvalidInputError("jaccl", f"{problem}; all ranks must reach one")
    # a self-assigned address last; a cable's network has only two hosts
    return str(min(usable, key=lambda one: (one.is_link_local, one.network.prefixlen)).ip)


def _json(names: tuple[str, ...]) -> str | list[str] | None:
    return list(names) if len(names) > 1 else next(iter(names), None)
