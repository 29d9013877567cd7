"""What torch.compile needs of this machine: compilers, triton and Python's header files."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

Language = Literal["C", "C++"]
_USUAL: Final[dict[Language, tuple[str, tuple[str, ...]]]] = {
    "C": ("CC", ("gcc", "clang", "cc")), "C++": ("CXX", ("clang++",) if sys.platform == "darwin" else ("g++",)),
}  # fmt: skip
"""The variable that names one, and those that torch looks for."""


def compiler_of(language: Language) -> str | None:
    """Path of the compiler that torch would use; None: there is none."""
    variable, names = _USUAL[language]
    chosen = os.environ.get(variable, "").split()
    return next((path for name in (chosen[:1] or names) if (path := shutil.which(name))), None)


def lacking(kind: str) -> tuple[str, ...]:
    """What torch.compile needs for a kind of device (cpu, cuda or mps) and isn't here, in words; empty: nothing."""
    language: Language = "C" if kind == "cuda" else "C++"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    found = {
        "triton": kind != "cuda" or importlib.util.find_spec("triton") is not None,
        f"{language} compiler": compiler_of(language) is not None, "header files of Python": header.is_file(),
    }  # fmt: skip
    return tuple(name for name, is_here in found.items() if not is_here)


def lacks_of(found: Mapping[str, tuple[str, ...]] | None, device: str) -> tuple[str, ...] | None:
    """Of a device as in the run file, what `Facts.compile_lacks` says; "auto" is the first one, "gpu" the first that
    isn't the processor. None: not known."""
    if not found:
        return None
    if device == "gpu":
        return next((lacks for kind, lacks in found.items() if kind != "cpu"), None)
    return next(iter(found.values())) if device == "auto" else found.get(device.partition(":")[0])
