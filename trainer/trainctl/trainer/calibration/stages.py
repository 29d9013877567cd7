"""Stages of a calibration beside others of its machine: each begins when all of them are ready for it.

They measure passes at the same time, as they would train. A node that is done with that continues with passes until
the others are done too; then each measures the other parts alone.
"""

import contextlib
import threading
from collections.abc import Callable
from typing import IO, Final

from trainctl.trainer.calibration.findings import Part

PASSES: Final = 1
"""Passes and steps are measured."""
QUIET: Final = 2
"""Passes that only keep the machine busy end."""
REST: Final = 3
"""The other parts are measured; alone, a calibration may begin everything from its start."""
BEGINS: Final[dict[Part, int]] = {
    "data": 0, "passes": PASSES, "grid": PASSES, "forward": PASSES, "matmul": REST, "memory": REST, "disk": REST,
}  # fmt: skip
"""The stage that each part belongs to."""


class Stages:
    """What the measuring process may begin by now. A thread of its own raises it."""

    def __init__(self) -> None:
        self._reached, self._changed = 0, threading.Condition()

    def raise_to(self, stage: int) -> None:
        """All stages up to this one may begin."""
        with self._changed:
            self._reached = max(self._reached, stage)
            self._changed.notify_all()

    def has(self, stage: int, seconds: float = 0.0) -> bool:
        """Whether a stage may begin; waits for it up to so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._reached >= stage, seconds)


class StageRelay:
    """Passes on to each measuring process what may begin, and to `waits` what a process waits for."""

    def __init__(self, reached: int, waits: Callable[[int], None]) -> None:
        self.waits, self._reached, self._lock = waits, reached, threading.Lock()
        self._into: IO[str] | None = None

    @classmethod
    def alone(cls) -> "StageRelay":
        """Of a calibration that waits for no other."""
        return cls(REST, lambda _: None)

    def begin(self, into: IO[str]) -> None:
        """Another process, by its standard input."""
        with self._lock:
            self._into = into
            self._tell()

    def raise_to(self, stage: int) -> None:
        """All stages up to this one may begin."""
        with self._lock:
            self._reached = max(self._reached, stage)
            self._tell()

    def _tell(self) -> None:
        if self._into is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                self._into.write(f"{self._reached}\n")
                self._into.flush()
