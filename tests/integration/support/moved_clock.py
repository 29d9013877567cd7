"""A wall clock that a test moves: of all Python programs that are started with these variables, ours and real."""

from pathlib import Path

START_UP = """\
import os
import time

_real = time.time


def _moved():
    try:
        with open(os.environ["TEST_CLOCK_OFFSET"], encoding="ascii") as file:
            return _real() + float(file.read() or 0)
    except (OSError, ValueError):
        return _real()


time.time = _moved
"""
"""Python runs a module of the name sitecustomize when it starts."""


class MovedClock:
    """A wall clock for programs: that of the machine, moved by some seconds."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(START_UP, encoding="ascii")
        self._offset = folder / "offset"
        self.environment = {"PYTHONPATH": str(folder), "TEST_CLOCK_OFFSET": str(self._offset)}

    def move(self, seconds: float) -> None:
        """From now on, so many seconds from the machine's clock."""
        written = self._offset.with_suffix(".new")
        written.write_text(str(seconds), encoding="ascii")
        written.replace(self._offset)
