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
"""Seconds the main thread may take to leave by itself, if there is nothing to write."""
WRITE_SECONDS, LOOK_SECONDS = 60.0, 0.1
"""Seconds that a checkpoint may make no progress, and between two looks at that. A micro-batch in flight is finished
before it begins."""


class Termination:
    """Make it before any other thread, so that all inherit the mask. `number` is the signal that came, else None."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._leave: Callable[[], None] | None = None
        self._written: Callable[[], int | None] = lambda: None
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        threading.Thread(target=self._wait, name="termination", daemon=True).start()

    @property
    def exit_status(self) -> int:
        """As a shell gives it; 0 if no signal came."""
        return 0 if self.number is None else 128 + self.number

    def leave_by(self, leave: Callable[[], None], written: Callable[[], int | None] = lambda: None) -> None:
        """What makes the main thread leave. Until it is known there is nothing to save, and a signal ends at once.
        `written`: bytes written of a checkpoint that is to be waited for; None: there is none."""
        self._leave, self._written = leave, written

    def _wait(self) -> None:
        self.number = signal.sigwait(SIGNALS)
        if self._leave is not None:
            self._leave()
            self._be_patient()
        os._exit(self.exit_status)

    def _be_patient(self) -> None:
        """As long as a checkpoint makes progress, and for a while without one."""
        mark, since = self._written(), time.monotonic()
        while time.monotonic() < since + (GRACE_SECONDS if mark is None else WRITE_SECONDS):
            time.sleep(LOOK_SECONDS)
            if (now := self._written()) != mark:
                mark, since = now, time.monotonic()
