"""Presets by NVIDIA architecture: what a first run with adapters computes in and how it passes over a step's samples.

Starting points for cards of 8 to 24 GB. On Apple chips, and for all weights, the memory estimate decides instead.
"""

import re
from typing import Final, Literal, NamedTuple

from trainctl.protocol.config.run_tables import ComputeDtype


class Preset(NamedTuple):
    """Where a run on one card starts."""

    name: str
    dtype: ComputeDtype
    base: Literal["stored", "nf4"]  # of a model that isn't quantized yet
    micro: int | None  # samples of a pass; None: by memory
    accumulation: int  # passes of a step, with `micro`
    sequence_length: int | None = None  # at most, in tokens; None: by the data

    @property
    def batch(self) -> int | None:
        """Samples of a step; None: by the data."""
        return None if self.micro is None else self.micro * self.accumulation


HOPPER: Final = Preset("Hopper", "bfloat16", "stored", None, 1)
AMPERE: Final = Preset("Ampere or Ada", "bfloat16", "nf4", 4, 2)
TURING: Final = Preset("Turing", "float16", "nf4", 2, 4)
GTX_16: Final = Preset("GTX 16", "float16", "nf4", 1, 8, 512)
PASCAL: Final = Preset("Pascal", "float32", "nf4", 1, 8, 512)
"""Pascal computes float16 at 1/64 of float32's rate (but for the P100)."""


def preset_of(capability: tuple[int, int], name: str = "") -> Preset:
    """For a card by its compute capability and name. GTX 16 cards are Turing without tensor cores, and have 4 to 6 GB.
    Volta counts as Turing, newer architectures than Hopper as Hopper, and older ones than Pascal as Pascal."""
    if capability >= (9, 0):
        return HOPPER
    if capability >= (8, 0):
        return AMPERE
    if capability >= (7, 0):
        return GTX_16 if "GTX 16" in name else TURING
    return PASCAL


_CAPABILITIES: Final = (
    (re.compile(r"\b(GTX 10\d\d|TITAN Xp?|P100|P40|P4)\b"), (6, 1)), (re.compile(r"\b(V100|TITAN V)\b"), (7, 0)),
    (re.compile(r"\b(GTX 16\d\d|RTX 20\d\d|TITAN RTX|T4)\b"), (7, 5)),
    (re.compile(r"\b(RTX [34]0\d\d|A100|A10G?|A30|A40|L4|L40S?)\b"), (8, 0)),
    (re.compile(r"\b(RTX 50\d\d|H100|H200|GH200|B200|GB200)\b"), (9, 0)),
)  # fmt: skip
"""Compute capability of NVIDIA's architectures, at least, by names of their devices."""


def preset_of_device(device: str) -> Preset | None:
    """By the name that a driver reports. None for a device that isn't NVIDIA's, or whose name isn't known here."""
    if not any(vendor in device.lower() for vendor in ("nvidia", "tesla")):
        return None
    found = (capability for pattern, capability in _CAPABILITIES if pattern.search(device))
    return next((preset_of(capability, device) for capability in found), None)
