"""The errors that more than one folder of the trainer raises or handles, and how a program ends with them."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError

FAILURES = (TrainctlError, OSError, RuntimeError, MemoryError)
"""Errors that end a trainer or a worker with one line: ours, the system's and the array libraries'."""

LIBRARY_FAILURES = (OSError, RuntimeError, MemoryError, ValueError, LookupError, TypeError, AttributeError, ImportError)
"""Errors that libraries raise on files that they cannot take."""


class DeviceMemoryError(Exception):
    """The device has no room for this micro-batch. Its graph and gradient are freed; accumulators and weights are
    untouched. MLX adds a gradient in groups: where memory runs out after the first one, TrainctlError is raised
    instead, and ends the rank (`MlxBackend._add`)."""


class GroupError(TrainctlError):
    """Joining a group, summing over it or copying state within it failed. Accumulators, weights and optimizer are as
    they were, unless a copy of state stopped half-way: see step/rank.py for what this rank then holds."""


class EngineError(GroupError):
    """The text of an engine that failed; `peer` is the place of the rank that it is about, None if not known."""

    def __init__(self, text: str, peer: int | None) -> None:
        super().__init__(text)
        self.peer = peer


class AbandonedError(Exception):
    """The generation that a plan belongs to has been left; what was in flight is discarded."""


class OutdatedError(Exception):
    """An order of a generation lower than one already seen: its sender is no longer who orders here."""


def first_line(error: BaseException) -> str:
    """Return an exception as one line of at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and lines[0].endswith(":"):  # a heading
        lines = [" ".join(lines[:2])]
    return (lines[0] if lines else type(error).__name__)[:300]


@contextlib.contextmanager
def opened_by(library: str) -> Iterator[None]:
    """Raise RefusedError for what a library raises on a model that it is to open."""
    try:
        yield
    except (*LIBRARY_FAILURES, SystemExit) as error:  # mlx-lm exits if a family's module needs another package
        raise RefusedError(f"{library} can't open this model: {first_line(error)}; nothing was written") from None


def answer(subject: str, make: Callable[[], dict[str, Any]]) -> int:
    """Print as one JSON line what `make` returns, or what it raised as `where` and `problem`; a library's failure is
    one of `subject`. Return the exit status. What libraries print meanwhile goes to standard error."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    status = 0
    try:
        with contextlib.redirect_stdout(sys.stderr):
            line = make()
    except InvalidInputError as error:
        line, status = {"where": error.where, "problem": error.problem}, error.exit_code
    except TrainctlError as error:
        line, status = {"problem": str(error)}, error.exit_code
    except LIBRARY_FAILURES as error:
        line, status = {"problem": f"{subject}: {first_line(error)}"}, 1
    sys.stdout.write(json.dumps(line) + "\n")
    return status
