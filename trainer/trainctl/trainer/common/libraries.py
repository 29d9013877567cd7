"""The libraries that a process computes with: imported without torch where that has no use, kept out of garbage
collections, and their versions."""

import functools
import gc
import os
import platform
import sys
from typing import Any, Final

from trainctl.protocol.machine import nvidia
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.machine.large_imports import import_large

MODULES: Final = {
    "torch": "torch",
    "mlx": "mlx.core",
    "transformers": "transformers",
    "mlx-lm": "mlx_lm",
    "peft": "peft",
    "bitsandbytes": "bitsandbytes",
    "numpy": "numpy",
}
"""Names of packages, with a module of each: a package is in use once its module is imported."""
_version = functools.cache(installed_version)


def import_without_torch(name: str) -> None:
    """Import a module as where torch isn't installed: transformers, which reads tokenizers, imports torch wherever it
    is, and that takes half of such a process's start. A process in which torch or transformers has been imported
    imports it as usual: transformers looks for torch only once."""
    if "torch" in sys.modules or "transformers" in sys.modules:
        import_large(name)
        return
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is fetched
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would warn that there is no torch
    sys.modules["torch"] = None  # type: ignore[assignment]  # what importlib takes for a module that can't be found
    try:
        import_large(name)
    finally:
        del sys.modules["torch"]


def keep_what_is_loaded() -> None:
    """Collect garbage from here on, but not among what was loaded: a full collection among torch's half a million
    objects takes 0.3 s, in the middle of a step, and 1 s at the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


def versions_in_use(device: str) -> tuple[tuple[str, str], ...]:
    """Return pairs (name, version), Python's first; on a CUDA device also of its runtime, if torch is in use, and of
    its driver. A version that can't be read is left out."""
    versions = {"python": platform.python_version()}
    versions |= {name: _version(name) or "" for name, module in MODULES.items() if module in sys.modules}
    if device.startswith("cuda") or "NVIDIA" in device:
        torch: Any = sys.modules.get("torch")
        versions |= {"cuda": (torch and torch.version.cuda) or "", "driver": nvidia.driver_version()}
    return tuple((name, version) for name, version in versions.items() if version)
