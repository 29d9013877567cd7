"""Ends the process when its event loop has stalled for too long, where no supervisor's watchdog does."""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import IO

EXIT_STATUS = 70
LOOKS = 8
"""Number of times the beat is checked within one limit."""
TELL_SECONDS = 2.0
"""Seconds the end waits for the log to be written."""


class Stall:
    """Seconds for which a loop has stalled, as seen by looks at its count of beats."""

    def __init__(self, look_seconds: float) -> None:
        self._look_seconds, self._count, self.seconds = look_seconds, -1, 0.0

    def seen(self, count: int) -> float:
        """The count at this look; gives for how many seconds it hasn't moved. They are counted in looks, not by a
        clock: a machine that slept, or a process that was stopped, made no looks either."""
        self.seconds = 0.0 if count != self._count else self.seconds + self._look_seconds
        self._count = count
        return self.seconds


class Watchdog:
    """A thread that watches the loop's beats. `sys.exit` there would end the thread only: it ends the process.

    What holds the interpreter's own lock for so long stops this thread too.
    """

    def __init__(
        self, limit_seconds: float, told: Callable[[float], None], traces: Callable[[], IO[str] | None]
    ) -> None:
        """`told` hears of a stall (seconds) just before the end; where all threads are goes to the file `traces`."""
        self._limit, self._told, self._traces = limit_seconds, told, traces
        self._count, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stall guard", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat(self) -> None:
        """The loop turns."""
        self._count += 1

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        look_seconds = self._limit / LOOKS
        stall = Stall(look_seconds)
        while not self._over.wait(look_seconds):
            if stall.seen(self._count) >= self._limit:
                # In a thread of its own: the loop may stall with the log's lock, or at the log's disk.
                telling = threading.Thread(target=self._tell, args=(stall.seconds,), daemon=True)
                telling.start()
                telling.join(TELL_SECONDS)
                os._exit(EXIT_STATUS)

    def _tell(self, seconds: float) -> None:
        self._told(seconds)
        faulthandler.dump_traceback(self._traces() or sys.stderr, all_threads=True)
