"""Recorders: what a backend's library can record of steps."""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from trainctl.protocol.errors import TrainctlError


class CannotProfileError(TrainctlError):
    """This rank can't record a profile; the text is why, and what to do."""


class Recorder(Protocol):
    """Records steps; all methods but `write` are for the main thread."""

    lacks: str
    """What the trace lacks on this device, and why; empty: nothing."""

    def start(self) -> None:
        """Before the step that warms up. Raises CannotProfileError."""

    def range(self, name: str) -> AbstractContextManager[object]:
        """A range of the trace, while the context lasts."""

    def step_ended(self) -> None:
        """After each step, the one that warms up among them."""

    def stop(self) -> None:
        """After the last step, or early. Nothing of the recorder slows later steps."""

    def write(self, path: Path) -> None:
        """Write the trace as JSON, from any thread. Raises OSError."""
