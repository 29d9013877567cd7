"""The answer of a module that makes a folder in a process of its own: one JSON line, and an exit status that fits."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.trainer.common.errors import first_line

_FAILURES = (OSError, RuntimeError, MemoryError, ValueError, LookupError, TypeError, AttributeError, ImportError)
"""What libraries raise on files that they cannot take."""


@contextlib.contextmanager
def opened_by(library: str) -> Iterator[None]:
    """Raises RefusedError for what a library raises on a model that it is to open."""
    try:
        yield
    except (*_FAILURES, SystemExit) as error:  # mlx-lm exits if a family's module needs another package
        raise RefusedError(f"{library} can't open this model: {first_line(error)}; nothing was written") from None


def answered(what: str, make: Callable[[], dict[str, Any]]) -> int:
    """Print what `make` returns, or what it raised as `where` and `problem`; a library's failure is one of `what`.
    Returns the exit status. What libraries print meanwhile goes to standard error."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with contextlib.redirect_stdout(sys.stderr):
            made = make()
    except InvalidInputError as error:
        return _say({"where": error.where, "problem": error.problem}, error.exit_code)
    except TrainctlError as error:
        return _say({"problem": str(error)}, error.exit_code)
    except _FAILURES as error:
        return _say({"problem": f"{what}: {first_line(error)}"}, 1)
    return _say(made, 0)


def _say(value: dict[str, Any], status: int) -> int:
    sys.stdout.write(json.dumps(value) + "\n")
    return status
