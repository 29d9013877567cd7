"""What stands ready to make the reducer of a rank's next group.

On Linux a fork server with the engine imported makes it. Elsewhere a fork isn't safe once a system library is in use,
so a process of its own waits with its engine imported, and is replaced when it is taken.
"""

import contextlib
import sys
import threading
from typing import Protocol

from trainctl.protocol.messages import Engine
from trainctl.trainer.collective.fork_client import ForkStandby
from trainctl.trainer.collective.reducer_process import GroupError, ReducerProcess, Spawned, spawn


class Standby(Protocol):
    """What has, or makes, a reducer for the next group; from any thread."""

    def prepare(self, engine: Engine) -> None:
        """Have `engine` imported, or being imported. Raises GroupError if no process can be had."""

    def take(self, engine: Engine) -> ReducerProcess:
        """A reducer that has imported `engine` or is about to; it is the caller's from here on. Returns at once.
        Raises GroupError."""

    def close(self) -> None: ...


def standby_here() -> Standby:
    """Of the kind that this system allows."""
    return ForkStandby() if sys.platform == "linux" else SpawnStandby()


def early_standby(engine: Engine | None) -> Standby:
    """One that is at `engine` already, so that nobody waits for it once this rank is there. Call it before there are
    threads. What goes wrong comes again, and is told, when it is needed."""
    standby = standby_here()
    if engine is not None:
        with contextlib.suppress(GroupError, ImportError, OSError, RuntimeError):
            if isinstance(standby, ForkStandby):
                standby.branch_off(engine)
            else:
                standby.prepare(engine)
    return standby


class SpawnStandby:
    """A `Standby`: at most one process that waits to be used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: ReducerProcess | None = None
        self._prepared: set[Engine] = set()  # by the one that waits
        self._closed = False

    def prepare(self, engine: Engine) -> None:
        with self._lock:
            if self._closed:
                return
            if self._waiting is not None and not _lives(self._waiting):
                self._waiting.close()
                self._waiting = None
            if self._waiting is None:
                self._waiting, self._prepared = spawn(), set()
            if engine not in self._prepared:
                self._prepared.add(engine)
                self._waiting.prepare(engine)

    def take(self, engine: Engine) -> ReducerProcess:
        self.prepare(engine)
        with self._lock:
            taken, self._waiting = self._waiting, None
        if taken is None:
            raise GroupError("this rank is leaving")
        return taken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._waiting is not None:
                self._waiting.close()
                self._waiting = None


def _lives(reducer: ReducerProcess) -> bool:
    return isinstance(reducer.life, Spawned) and reducer.life.process.poll() is None
