"""The standby that makes the reducers of a rank's next group without delay.

On Linux a fork server with the engine imported makes them. Elsewhere a fork isn't safe once a system library is in use,
so processes of their own wait with their engine imported. They cost 160 MB each with torch, and 1.6 s of CPU after
every group; forks cost 5 MB and none.
"""

import contextlib
import gc
import importlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
from typing import NoReturn

from trainctl.protocol.messages import Engine
from trainctl.trainer.collective.channel import Born, Channel, Done, Failed, Fork, Gone, Prepare, Release
from trainctl.trainer.collective.reducer import serve_forks
from trainctl.trainer.collective.reducer_process import REAP_SECONDS, Child, ReducerProcess, is_stopped, spawn, start
from trainctl.trainer.common.errors import GroupError

_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment in which libraries that start threads on import start none."""


class _Server:
    """This end of a fork server; `lock` is held around all use of its channel, from any thread."""

    def __init__(self, process: Child, channel: Channel) -> None:
        self.process, self._channel = process, channel
        self.lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._closed = False
        self.forks: dict[int, _Forked] = {}  # those not let go of

    @property
    def lives(self) -> bool:
        return self.process.poll() is None and not is_stopped(self.process.pid)

    def prepare(self, engine: Engine) -> None:
        """Have it import an engine, once; returns at once."""
        with self.lock:
            self.send(Prepare(engine))

    def send(self, order: Prepare | Release) -> None:
        with contextlib.suppress(OSError):  # it is dead, its reducers are too, and it is replaced at the next `take`
            self._channel.send(order)

    def fork(self) -> ReducerProcess:
        """Raise GroupError if the server has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self.lock:
            number = next(self._numbers)
            try:
                self._channel.send(Fork(number), [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise GroupError(f"cannot fork a reducer: {error.strerror}") from None
            self.forks[number] = forked = _Forked(self, number)
        return ReducerProcess(forked, Channel(ours))

    def hear(self, seconds: float = 0.0) -> None:
        """Take in what the server has said, waiting so long for the first word."""
        while not self._closed and self._channel.has_answer(seconds):
            try:
                answer = self._channel.next_answer(REAP_SECONDS)
            except (EOFError, TimeoutError):
                self.process.kill()  # its end of the channel is closed, or no use any more
                return
            match answer:
                case Born(number=number) if number in self.forks:
                    self.forks[number].born = answer.pid
                case Gone(number=number) if number in self.forks:
                    self.forks[number].status = answer.status
                case Born() | Gone() | Done() | Failed():
                    pass  # let go of already, or a reducer's answer, which this isn't
            seconds = 0.0

    def close(self) -> None:
        """End the server, and its reducers with it."""
        with self.lock:
            self._closed = True
            self._channel.close()
            if not self.forks or not self.lives:
                self.process.kill()  # it may be importing, and would finish that first
        if self.process.reap() is None:
            self.process.kill()
            self.process.reap()


class _Forked:
    """A reducer that the server has made, or will."""

    def __init__(self, server: _Server, number: int) -> None:
        self._server, self._number = server, number
        self.born: int | None = None  # its process id, once the server has said it
        self.status: int | None = None
        self._released = False

    @property
    def pid(self) -> int | None:
        with self._server.lock:
            self._server.hear()
        return self.born

    def kill(self) -> None:
        """Kill it now, or as soon as it is born."""
        with self._server.lock:
            self._server.hear()
            if self.born is None or self._server.process.poll() is not None:
                self._release()
            elif not self._released:
                with contextlib.suppress(ProcessLookupError):  # the server is dead, and it with it
                    os.kill(self.born, signal.SIGKILL)

    def reap(self) -> int | None:
        with self._server.lock:
            self._release()
        due = time.monotonic() + REAP_SECONDS
        while self.status is None and time.monotonic() < due and self._server.lives:
            with self._server.lock:  # for a moment: another thread may have to kill or fork
                self._server.hear(0.02)
            time.sleep(0.001)
        with self._server.lock:
            self._server.forks.pop(self._number, None)
        return self.status

    def _release(self) -> None:
        if not self._released and self._number in self._server.forks:
            self._released = True
            self._server.send(Release(self._number))


class ForkStandby:
    """Reducers from a fork server, which is replaced should it die."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._closed = False

    def fork_self(self, engine: Engine) -> None:
        """`prepare` by a fork of this process; see `fork_self` for when that may be, and for what it raises."""
        with self._lock:
            self._server = _Server(*fork_self(engine))
            self._server.prepare(engine)

    def prepare(self, engine: Engine, count: int = 1) -> None:
        """Have `engine` imported, or being imported; one server makes any number. Raises GroupError if no process can
        be had."""
        with self._lock:
            self._prepared(engine)

    def take(self, engine: Engine) -> ReducerProcess:
        """Return a reducer that has imported `engine` or is about to; it is the caller's from here on. Raises
        GroupError."""
        with self._lock:
            server = self._prepared(engine)
            if server is None:
                raise GroupError("this rank is leaving")
            return server.fork()

    def _prepared(self, engine: Engine) -> _Server | None:
        if self._closed:
            return None
        if self._server is not None and not self._server.lives:
            self._server.close()
            self._server = None
        if self._server is None:
            self._server = _Server(*start({**os.environ, **_ENVIRONMENT}, "--forks"))
        self._server.prepare(engine)
        return self._server

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.close()
                self._server = None


class SpawnStandby:
    """Reducers that wait to be used, each a process that has imported the engine; one that is taken is replaced."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[ReducerProcess] = []
        self._closed = False

    def prepare(self, engine: Engine, count: int = 1) -> None:
        """Have so many processes with `engine` imported, or being imported. Raises GroupError if none can be had."""
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
        """Return a reducer as `ForkStandby.take` does. Raises GroupError."""
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
    return isinstance(reducer.life, Child) and reducer.life.poll() is None


Standby = ForkStandby | SpawnStandby


def standby_here() -> Standby:
    """Return the standby that this system allows."""
    return ForkStandby() if sys.platform == "linux" else SpawnStandby()


def early_standby(engine: Engine | None) -> Standby:
    """Return a standby that is at `engine` already, so that no one waits for it once this rank is there. Call it before
    there are threads. What goes wrong comes again, and is reported, when it is needed."""
    standby = standby_here()
    if engine is not None:
        with contextlib.suppress(GroupError, ImportError, OSError, RuntimeError):
            if isinstance(standby, ForkStandby):
                standby.fork_self(engine)
            else:
                standby.prepare(engine)
    return standby


def fork_self(engine: Engine) -> tuple[Child, Channel]:
    """Import what this process and `engine` share, and make a fork server that has it too. Call it before there is a
    thread that may hold a lock: a fork takes the locks along, but not who would let go of them. Raises GroupError if no
    process can be made, and whatever a broken library raises as it is imported."""
    # torch's backend imports it anyway; MLX's has no other use for it, but the server needs it soon.
    if engine == "gloo":
        importlib.import_module("torch")
    gc.freeze()  # a collection in either process would copy what they share
    ours, theirs = socket.socketpair()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    trainer = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        ours.close()
        theirs.close()
        raise GroupError(f"cannot start a reducer: {error}") from None
    if pid == 0:
        _be_server(ours, theirs, trainer)
    theirs.close()
    return Child(pid), Channel(ours)


def _be_server(ours: socket.socket, theirs: socket.socket, trainer: int) -> NoReturn:
    try:
        ours.close()
        os.dup2(2, 1)  # its output goes where the trainer's own does: the log
        serve_forks(Channel(theirs), trainer)
    finally:
        os._exit(1)
