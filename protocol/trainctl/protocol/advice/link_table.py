"""Kinds of networks, and the links that are assumed where none was measured. Pure."""

from typing import Final, NamedTuple

TCP_PART: Final = 1448 / 1538
"""Part of a link's bit rate that TCP carries with Ethernet frames of 1,500 bytes: 1,448 bytes of 1,538 on the wire."""
_BITS: Final = 8


class LinkKind(NamedTuple):
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
