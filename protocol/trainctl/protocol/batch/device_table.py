"""Devices that nothing was measured on: datasheets, data types, and presets by NVIDIA's architectures. Pure.

Advice, simulations and MFU share it.
NVIDIA's datasheets of the A100 (SXM and PCIe), H100 SXM, H200 SXM, DGX B200, L4, T4 and V100 SXM2, and its architecture
papers of GA102 and AD102. Apple publishes no peaks of matrix products, so its devices aren't here.
"""

import re
from dataclasses import dataclass
from typing import Final, Literal

from trainctl.protocol.config.run_tables import ComputeDtype

USED_PART: Final = 0.4
"""Part of a device's peak that training reaches, if it isn't measured: most reports are from 0.3 to 0.5."""
_VENDOR: Final = re.compile(r"nvidia|tesla", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """One device of a datasheet."""

    name: str
    pattern: re.Pattern[str]  # found in the name that its driver reports
    tflops: float  # dense products in 16 bits that are summed in 32, 10^12 per second
    memory_bytes: int
    watts: float  # highest power of the device, without its machine
    nvlink_bytes_per_second: float = 0.0  # each way, of the datasheet's sum of both; 0: not used here
    has_bfloat16: bool = True

    @property
    def title(self) -> str:
        """Return the device's name with its vendor."""
        return f"NVIDIA {self.name}"

    @property
    def key(self) -> str:
        """Return the device's name in a cluster file."""
        return self.name.lower().removeprefix("geforce ").replace("rtx ", "rtx").replace(" ", "-")

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Data types that its peak is of, the best first."""
        return ("bfloat16", "float16") if self.has_bfloat16 else ("float16",)

    def peak(self, dtype: str) -> float | None:
        """Operations per second of products in a data type, "auto": the best one; None for one that `tflops` isn't
        of."""
        return self.tflops * 1e12 if dtype in ("auto", *self.dtypes) else None

    @property
    def known_for(self) -> str:
        """Return what to say where `peak` is None."""
        return "its speed is known for model.dtype = {} alone".format(" or ".join(f'"{one}"' for one in self.dtypes))


def _key(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


DEVICES: Final = (
    Device("A100", re.compile(r"\bA100\b(?!.*(40GB|PCIe))", re.IGNORECASE), 312.0, 80 * 10**9, 400.0, 300e9),
    Device("A100 40GB", re.compile(r"\bA100\b(?!.*PCIe).*40GB", re.IGNORECASE), 312.0, 40 * 10**9, 400.0, 300e9),
    Device("A100 PCIe 80GB", re.compile(r"\bA100\b(?=.*PCIe)(?!.*40GB)", re.IGNORECASE), 312.0, 80 * 10**9, 300.0),
    Device("A100 PCIe 40GB", re.compile(r"\bA100\b(?=.*PCIe).*40GB", re.IGNORECASE), 312.0, 40 * 10**9, 250.0),
    Device("H100", re.compile(r"\bH100\b(?!.*\b(PCIe|NVL)\b)"), 989.0, 80 * 10**9, 700.0, 450e9),
    Device("H200", re.compile(r"\bH200\b(?!.*\bNVL\b)"), 989.0, 141 * 10**9, 700.0, 450e9),
    Device("B200", re.compile(r"\bB200\b"), 2250.0, 180 * 10**9, 1000.0, 900e9),
    Device("L4", re.compile(r"\bL4\b"), 121.0, 24 * 10**9, 72.0),
    Device("GeForce RTX 3090", re.compile(r"\bRTX 3090\b(?! Ti)"), 71.0, 24 * 10**9, 350.0),
    Device("GeForce RTX 4090", re.compile(r"\bRTX 4090\b(?! (D|Laptop)\b)"), 165.0, 24 * 10**9, 450.0),
    Device("T4", re.compile(r"\bT4\b"), 65.0, 16 * 10**9, 70.0, has_bfloat16=False),
    Device("V100", re.compile(r"\bV100\b(?!.*(PCIE|16GB))"), 125.0, 32 * 10**9, 300.0, 150e9, has_bfloat16=False),
)


def device_of(name: str) -> Device | None:
    """The row of a device by the name that its driver reports; None for one that isn't in the table."""
    if not _VENDOR.search(name):
        return None
    return next((one for one in DEVICES if one.pattern.search(name)), None)


def device_named(name: str) -> Device | None:
    """The row of a device by its name in a cluster file, such as rtx4090; None for one that isn't in the table."""
    return next((one for one in DEVICES if _key(one.key) == _key(name)), None)


def no_such_device(name: str) -> str:
    """Return what to say about a name that `device_named` doesn't know."""
    return f"no device {name!r}; known are {', '.join(sorted(one.key for one in DEVICES))}, or give samples_per_second"


def datasheet_tflops(device: str, dtype: str) -> float | None:
    """10^12 per second that the datasheet states for dense products, by the name that the driver reports; None if
    device or dtype isn't known."""
    found = device_of(device)
    return found.tflops if found is not None and dtype == "bfloat16" and found.has_bfloat16 else None


BFLOAT16_CAPABILITY: Final = (8, 0)
"""Compute capability of CUDA devices from which products in bfloat16 are computed in hardware: Ampere."""
FLOAT16_CAPABILITY: Final = (7, 0)
"""Compute capability from which float16 is faster than float32: Volta, then Turing. Pascal has 1/64 of that rate."""
_APPLE: Final = re.compile(r"\bApple (M1\b)?")


def types_of_capability(capability: tuple[int, int]) -> tuple[ComputeDtype, ...]:
    """Return the data types of a CUDA device. The GTX 16 cards are Turing without tensor cores: float16 still is twice
    as fast."""
    if capability >= BFLOAT16_CAPABILITY:
        return ("bfloat16", "float16")
    return ("float16",) if capability >= FLOAT16_CAPABILITY else ()


def types_of_device(name: str) -> tuple[ComputeDtype, ...] | None:
    """Return the data types of a GPU by the name of its driver or its Apple chip; None if it isn't known. The M1 (also
    Pro, Max and Ultra) converts bfloat16 to float32 by instructions; chips from M2 on have it in hardware."""
    capability = capability_of_device(name)
    if capability is not None:
        return types_of_capability(capability)
    found = _APPLE.search(name)
    if found is None:
        return None
    return ("float16",) if found[1] else ("bfloat16", "float16")


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
