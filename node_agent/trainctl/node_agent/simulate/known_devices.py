"""Devices that a simulated node can name: their datasheets' peaks and memory. What is made of them is an estimate."""

from typing import Final, NamedTuple

from trainctl.protocol.errors import InvalidInputError

SUSTAINED: Final = 0.4
"""Part of a datasheet's peak that training is assumed to reach: well-tuned runs report 0.3 to 0.5."""


class KnownDevice(NamedTuple):
    """By the vendor's datasheet."""

    title: str
    tflops: float  # dense products in 16 bits, 10^12 per second
    memory_gb: float  # 10^9 bytes


KNOWN: Final = {
    "a100": KnownDevice("NVIDIA A100", 312.0, 80.0),
    "b200": KnownDevice("NVIDIA B200", 2250.0, 180.0),
    "h100": KnownDevice("NVIDIA H100", 989.0, 80.0),
    "h200": KnownDevice("NVIDIA H200", 989.0, 141.0),
    "l4": KnownDevice("NVIDIA L4", 121.0, 24.0),
    "rtx3090": KnownDevice("NVIDIA GeForce RTX 3090", 71.0, 24.0),
    "rtx4090": KnownDevice("NVIDIA GeForce RTX 4090", 165.0, 24.0),
    "t4": KnownDevice("NVIDIA T4", 65.0, 16.0),
    "v100": KnownDevice("NVIDIA V100", 125.0, 32.0),
}
"""By the name in a cluster file."""


def known(name: str, where: str) -> KnownDevice:
    """Raises InvalidInputError blaming `where` if no device has that name."""
    found = KNOWN.get(name.lower().replace("-", "").replace(" ", ""))
    if found is None:
        raise InvalidInputError(where, f"no device {name!r}; known are {', '.join(KNOWN)}, or give samples_per_second")
    return found
