"""Compilers of this machine, which torch.compile needs."""

import os
import shutil
import sys
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
