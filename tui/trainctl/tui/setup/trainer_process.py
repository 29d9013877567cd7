"""Modules of the trainer that look at a run file in a process of their own, and print one JSON line."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from trainctl.protocol.errors import InvalidInputError

T = TypeVar("T")


def answer_of(
    module: str, file: Path, node: str, overrides: Mapping[str, str], *more: str, answer: type[T]
) -> T:  # fmt: skip
    """What `python -m MODULE RUN.toml` prints of a run file as a node has it. Raises InvalidInputError with what that
    found wrong."""
    changed = [f"--set={key}={value}" for key, value in overrides.items()]
    words = [sys.executable, "-m", module, str(file), "--node", node, *more, *changed]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        printed, told = process.communicate()
    if process.returncode:
        name, lines = module.rpartition(".")[2], told.strip().splitlines()
        place, _, problem = (lines[-1] if lines else f"{name}: exit status {process.returncode}").partition(": ")
        raise InvalidInputError(place, problem)
    return msgspec.json.decode(printed, type=answer)
