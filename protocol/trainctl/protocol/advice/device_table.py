"""What datasheets say of devices and links: for nodes that weren't calibrated, and for the reference cluster. Pure.

Devices: NVIDIA's datasheets of the A100 80GB SXM, H100 SXM, H200 SXM and the DGX B200. The peaks of their matrix
products are in batch/flops.py. Apple publishes no such peaks, so its devices aren't here.
"""

import re
from typing import Final, NamedTuple

from trainctl.protocol.batch.flops import datasheet_tflops

USED_PART: Final = 0.4
"""Part of a device's matmul peak that training reaches, if it isn't measured: most reports are from 0.3 to 0.5."""
TCP_PART: Final = 1448 / 1538
"""Part of a link's bit rate that TCP carries with Ethernet frames of 1,500 bytes: 1,448 bytes of 1,538 on the wire."""
_BITS: Final = 8


class Device(NamedTuple):
    """One device of a datasheet."""

    name: str
    pattern: re.Pattern[str]  # found in the name that its driver reports
    memory_bytes: int
    nvlink_bytes_per_second: float  # each way; the datasheet gives the sum of both
    watts: float  # highest power of the device, without its machine

    @property
    def tflops(self) -> float:
        """Dense bfloat16 products, 10^12 per second."""
        return datasheet_tflops(f"NVIDIA {self.name}", "bfloat16") or 0.0


DEVICES: Final = (
    Device("A100", re.compile(r"\bA100\b(?!.*40GB)"), 80 * 10**9, 300e9, 400.0),
    Device("H100", re.compile(r"\bH100\b(?!.*\b(PCIe|NVL)\b)"), 80 * 10**9, 450e9, 700.0),
    Device("H200", re.compile(r"\bH200\b(?!.*\bNVL\b)"), 141 * 10**9, 450e9, 700.0),
    Device("B200", re.compile(r"\bB200\b"), 180 * 10**9, 900e9, 1000.0),
)


def device_of(name: str) -> Device | None:
    """The row of a device by the name that its driver reports; None for one that isn't in the table."""
    if "nvidia" not in name.lower():
        return None
    return next((one for one in DEVICES if one.pattern.search(name)), None)


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
