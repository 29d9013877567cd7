"""Versions of the libraries that this process computes with, and of CUDA."""

import functools
import platform
import sys
from typing import Any, Final

from trainctl.protocol.machine import nvidia
from trainctl.protocol.machine.facts import installed_version

MODULES: Final = {
    "torch": "torch", "mlx": "mlx.core", "transformers": "transformers", "mlx-lm": "mlx_lm", "peft": "peft",
    "bitsandbytes": "bitsandbytes", "numpy": "numpy",
}  # fmt: skip
"""Names of packages, with a module of each: a package is in use once its module is imported."""
_version = functools.cache(installed_version)


def in_use(device: str) -> tuple[tuple[str, str], ...]:
    """Pairs (name, version), Python's first; on a CUDA device also of its runtime, if torch is in use, and of its
    driver. A version that can't be read is left out."""
    found = {"python": platform.python_version()}
    found |= {name: _version(name) or "" for name, module in MODULES.items() if module in sys.modules}
    if device.startswith("cuda") or "NVIDIA" in device:
        torch: Any = sys.modules.get("torch")
        found |= {"cuda": (torch and torch.version.cuda) or "", "driver": nvidia.driver_version()}
    return tuple((name, version) for name, version in found.items() if version)
