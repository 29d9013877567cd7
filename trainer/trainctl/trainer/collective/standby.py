"""The standby that makes the reducers of a rank's next group without delay.

On Linux a fork server with the engine imported makes them. Elsewhere a fork isn't safe once a system library is in use,
so processes of their own wait with their engine imported, and are replaced when they are taken.
"""

import contextlib
import sys
import threading
from typing import Protocol

from trainctl.protocol.messages import Engine
from trainctl.trainer.collective.fork_client import ForkStandby
from trainctl.trainer.collective.reducer_process import ReducerProcess, Spawned, spawn
from trainctl.trainer.common.errors import GroupError


class Standby(Protocol):
    """What has, or makes, reducers for the next group; from any thread."""

    def prepare(self, engine: Engine, count: int = 1) -> None:
        """Have `engine` imported, or being imported, for so many reducers. Raises GroupError if no process can be
        had."""

    def take(self, engine: Engine) -> ReducerProcess:
        """A reducer that has imported `engine` or is about to; it is the caller's from here on. Returns at once.
        Raises GroupError."""

    def close(self) -> None: ...


def standby_here() -> Standby:
    """Of the kind that this system allows."""
    return ForkStandby() if sys.platform == "linux" else SpawnStandby()


def early_standby(engine: Engine | None) -> Standby:
    """One that is at `engine` already, so that no one waits for it once this rank is there. Call it before there are
    threads. What goes wrong comes again, and is reported, when it is needed."""
    standby = standby_here()
    if engine is not None:
        with contextlib.suppress(GroupError, ImportError, OSError, RuntimeError):
            if isinstance(standby, ForkStandby):
                standby.fork_self(engine)
            else:
                standby.prepare(engine)
    return standby


class SpawnStandby:
    """A `Standby`: processes that wait to be used."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[ReducerProcess] = []
        self._closed = False

    def prepare(self, engine: Engine, count: int = 1) -> None:
        with self._lock:
            if self._closed:
                return
            for dead in [reducer for reducer in self._waiting if not _lives(reducer)]:
                self._waiting.remove(dead)
                dead.close()
            while len(self._waiting) < count:
                self._waiting.append(spawn())
            for reducer in self._waiting[:count]:
                reducer.prepare(engine)

    def take(self, engine: Engine) -> ReducerProcess:
        self.prepare(engine)
        with self._lock:
            if not self._waiting:
                raise GroupError("this rank is leaving")
            return self._waiting.pop(0)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._waiting:
                self._waiting.pop().close()


def _lives(reducer: ReducerProcess) -> bool:
    return isinstance(reducer.life, Spawned) and reducer.life.process.poll() is None
