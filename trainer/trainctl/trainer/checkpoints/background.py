"""The thread that writes checkpoints while training continues, one at a time, at low priority."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue

from trainctl.protocol.messages import Checkpointed

NICENESS = 10
"""Niceness of the thread: it gets a tenth of what a training thread gets of a busy core, and all of an idle one."""

Job = Callable[["WriteMeter"], Checkpointed]


class WriteMeter:
    """How far a write has come, in bytes; read from any thread."""

    def __init__(self, step: int, total_bytes: int) -> None:
        self.step, self.total_bytes, self.done_bytes = step, total_bytes, 0

    def __call__(self, count: int) -> None:
        self.done_bytes = min(self.total_bytes, self.done_bytes + count)


class BackgroundWriter:
    """`start` is for the main thread. A job raises nothing. `done` receives its outcome on the writer's thread, once
    the next job may start."""

    def __init__(self, done: Callable[[Checkpointed], None]) -> None:
        self._done = done
        self._jobs: SimpleQueue[tuple[Job, WriteMeter] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self.meter: WriteMeter | None = None
        """Of the write in progress; None: there is none."""

    @property
    def is_busy(self) -> bool:
        return not self._idle.is_set()

    def start(self, job: Job, meter: WriteMeter) -> None:
        """Queue a job. The one before must have ended."""
        assert not self.is_busy, "a checkpoint is still being written"
        self._idle.clear()
        self.meter = meter
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        self._jobs.put((job, meter))

    def wait(self) -> None:
        """Wait until nothing is being written. The outcome may not have been reported yet."""
        self._idle.wait()

    def close(self) -> None:
        """Finish what is being written, and end the thread."""
        self.wait()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        _lower_priority()
        while (item := self._jobs.get()) is not None:
            job, meter = item
            outcome = job(meter)
            del job, item  # with the arrays that it holds
            self.meter = None
            self._idle.set()
            self._done(outcome)


def _lower_priority() -> None:
    """Of this thread alone, which only Linux allows: elsewhere a thread's id may be another process's."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
