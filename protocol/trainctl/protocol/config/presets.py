"""Presets: the settings with which a run on one NVIDIA card starts, by its architecture."""

import re
from dataclasses import dataclass
from typing import Final, Literal

from trainctl.protocol.config.run_tables import ComputeDtype


@dataclass(frozen=True)
class Preset:
    """Settings with which a run on one card starts."""

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

    @property
    def text(self) -> str:
        """All of it, in words."""
        base = "a base in nf4" if self.base == "nf4" else "the base as stored"
        passes = "samples by memory" if self.micro is None else f"{self.micro} x {self.accumulation} samples"
        length = "" if self.sequence_length is None else f", at most {self.sequence_length} tokens"
        return f"{self.dtype}, {base}, {passes}{length}"


HOPPER: Final = Preset("Hopper", "bfloat16", "stored", None, 1)
AMPERE: Final = Preset("Ampere, Ada or RTX 50", "bfloat16", "nf4", 4, 2)
TURING: Final = Preset("Turing", "float16", "nf4", 2, 4)
GTX_16: Final = Preset("GTX 16", "float16", "nf4", 1, 8, 512)
PASCAL: Final = Preset("Pascal", "float32", "nf4", 1, 8, 512)
"""Pascal computes float16 at 1/64 of float32's rate (but for the P100)."""


def preset_of(capability: tuple[int, int], name: str = "") -> Preset:
    """Return the preset for a card by its compute capability and name. GTX 16 cards are Turing without tensor cores,
    and have 4 to 6 GB. Volta counts as Turing, Blackwell in data centres (10 and 11) as Hopper, GeForce and RTX PRO
    cards of that architecture (12) as Ampere, and older architectures than Pascal as Pascal."""
    if (9, 0) <= capability < (12, 0):
        return HOPPER
    if capability >= (8, 0):
        return AMPERE
    if capability >= (7, 0):
        return GTX_16 if "GTX 16" in name else TURING
    return PASCAL


_CAPABILITIES: Final = (
    (re.compile(r"\b(GTX 10\d\d|TITAN Xp?|P100|P40|P4)\b"), (6, 1)),
    (re.compile(r"\b(V100|TITAN V)\b"), (7, 0)),
    (re.compile(r"\b(GTX 16\d\d|RTX 20[678]0|Quadro RTX \d000|TITAN RTX|T4)\b"), (7, 5)),
    (re.compile(r"\b(RTX [34]0\d\d|RTX 2050|RTX A\d{3,4}|RTX \d{3,4}E? .*Ada)\b"), (8, 0)),
    (re.compile(r"\b(A100|A800|A10G?|A16|A30|A40|L4|L40S?)\b"), (8, 0)),
    (re.compile(r"\b(H100|H200|H800|GH200|B200|B300|GB200)\b"), (9, 0)),
    (re.compile(r"\b(RTX 50\d\d|RTX PRO \d000|GB10)\b"), (12, 0)),
)
"""Compute capability of NVIDIA's architectures, at least, by names of their devices."""


def capability_of_device(device: str) -> tuple[int, int] | None:
    """Return the compute capability by the name that a driver reports. None for a device that isn't NVIDIA's, or whose
    name isn't known here."""
    if not any(vendor in device.lower() for vendor in ("nvidia", "tesla", "quadro")):
        return None
    return next((capability for pattern, capability in _CAPABILITIES if pattern.search(device)), None)


def preset_of_device(device: str) -> Preset | None:
    """Return the preset by the name that a driver reports. None where `capability_of_device` has none."""
    capability = capability_of_device(device)
    return None if capability is None else preset_of(capability, device)
