"""The 16-bit data types in which a device computes faster, by its compute capability or its name. Pure."""

import re
from typing import Final

from trainctl.protocol.config.presets import capability_of_device
from trainctl.protocol.config.run_tables import ComputeDtype

BFLOAT16_CAPABILITY: Final = (8, 0)
"""Compute capability of CUDA devices from which products in bfloat16 are computed in hardware: Ampere."""
FLOAT16_CAPABILITY: Final = (7, 0)
"""The same for float16 at more than float32's rate: Volta, and then Turing. Pascal has it at 1/64 of that rate."""
_APPLE: Final = re.compile(r"\bApple (M1\b)?")


def types_of_capability(capability: tuple[int, int]) -> tuple[ComputeDtype, ...]:
    """Of a CUDA device. The GTX 16 cards are Turing without tensor cores: float16 still is twice as fast."""
    if capability >= BFLOAT16_CAPABILITY:
        return ("bfloat16", "float16")
    return ("float16",) if capability >= FLOAT16_CAPABILITY else ()


def types_of_device(name: str) -> tuple[ComputeDtype, ...] | None:
    """Of a GPU by the name of its driver or its Apple chip; None if it isn't known. The M1 (also Pro, Max and Ultra)
    converts bfloat16 to float32 by instructions; chips from M2 on have it in hardware."""
    capability = capability_of_device(name)
    if capability is not None:
        return types_of_capability(capability)
    found = _APPLE.search(name)
    if found is None:
        return None
    return ("float16",) if found[1] else ("bfloat16", "float16")
