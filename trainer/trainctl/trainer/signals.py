"""SIGTERM and SIGINT taken by a thread that waits for them, so that no wait in C code can swallow one.

A handler of Python's own runs on the main thread between two bytecodes. One that comes just before the thread sleeps on
a queue is seen only when something else wakes it.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

SIGNALS = {signal.SIGTERM, signal.SIGINT}
GRACE_SECONDS = 5.0
"""Seconds the main thread may take to leave by itself; a micro-batch in flight is finished first."""


class Termination:
    """Make it before any other thread, so that all inherit the mask. `number` is the signal that came, else None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._leave: Callable[[], None] | None = None
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._wait, name="termination", daemon=True).start()

    @property
    def exit_status(self) -> int:
        """As a shell gives it; 0 if no signal came."""
        return 0 if self.number is None else 128 + self.number

    def leave_by(self, leave: Callable[[], None]) -> None:
        """What makes the main thread leave. Until it is known there is nothing to save, and a signal ends at once."""
        self._leave = leave

    def _wait(self) -> None:
        self.number = signal.sigwait(SIGNALS)
        if self._leave is not None:
            self._leave()
            time.sleep(GRACE_SECONDS)
        os._exit(self.exit_status)
