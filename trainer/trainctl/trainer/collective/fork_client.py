"""Reducers from a fork server: a trainer's end of it."""

import contextlib
import gc
import importlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import NoReturn

from trainctl.protocol.messages import Engine
from trainctl.trainer.collective import forkserver
from trainctl.trainer.collective.channel import Born, Channel, Done, Failed, Fork, Gone, Prepare, Release
from trainctl.trainer.collective.forkserver import ENVIRONMENT
from trainctl.trainer.collective.reducer_process import REAP_SECONDS, ReducerProcess, is_stopped, start
from trainctl.trainer.common.errors import GroupError


class _Server:
    """This end of a fork server."""

    def __init__(self, process: "subprocess.Popen[bytes] | ForkedServer", channel: Channel) -> None:
        self.process, self._channel = process, channel
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._prepared: set[Engine] = set()
        self._closed = False
        self._open: set[int] = set()  # numbers of those forked and not let go of
        self._released: set[int] = set()  # already asked of the server
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}

    @property
    def lives(self) -> bool:
        return self.process.poll() is None and not is_stopped(self.process.pid)

    def prepare(self, engine: Engine) -> None:
        if engine in self._prepared:
            return
        with self._lock:
            if engine not in self._prepared:
                self._prepared.add(engine)
                with contextlib.suppress(OSError):  # one that is dead is replaced when it is asked for more
                    self._channel.send(Prepare(engine))

    def fork(self) -> ReducerProcess:
        """Raises GroupError if the server has ended."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            number = next(self._numbers)
            try:
                self._channel.send(Fork(number), [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise GroupError(f"cannot fork a reducer: {error.strerror}") from None
            self._open.add(number)
        return ReducerProcess(_Forked(self, number), Channel(ours))

    def pid(self, number: int) -> int | None:
        with self._lock:
            self._hear(0.0)
            return self._pids.get(number)

    def kill(self, number: int) -> None:
        """One that isn't born yet is killed as soon as it is."""
        with self._lock:
            self._hear(0.0)
            pid = self._pids.get(number) if self.process.poll() is None else None
            if pid is None:
                self._release(number)
            elif number not in self._released:
                with contextlib.suppress(ProcessLookupError):  # the server is dead, and it with it
                    os.kill(pid, signal.SIGKILL)

    def reap(self, number: int) -> int | None:
        with self._lock:
            self._release(number)
        due = time.monotonic() + REAP_SECONDS
        while number not in self._statuses and time.monotonic() < due and self.lives:
            with self._lock:  # for a moment: another thread may have to kill or fork
                self._hear(0.02)
            time.sleep(0.001)
        with self._lock:
            for known in (self._open, self._released):
                known.discard(number)
            self._pids.pop(number, None)
            return self._statuses.pop(number, None)

    def _release(self, number: int) -> None:
        if number in self._open and number not in self._released:
            self._released.add(number)
            with contextlib.suppress(OSError):  # with the server dead, its reducers are too
                self._channel.send(Release(number))

    def _hear(self, seconds: float) -> bool:
        """Take in what has been said, waiting so long for the first word; False if there was none."""
        heard = False
        while not self._closed and self._channel.has_answer(0.0 if heard else seconds):
            try:
                answer = self._channel.next_answer(REAP_SECONDS)
            except (EOFError, TimeoutError):
                self.process.kill()  # its end of the channel is closed, or no use any more
                return False
            heard = True
            match answer:
                case Born():
                    self._pids[answer.number] = answer.pid
                case Gone():
                    self._statuses[answer.number] = answer.status
                case Done() | Failed():
                    pass  # a reducer's, which this isn't
        return heard

    def close(self) -> None:
        """Its reducers end with it."""
        with self._lock:
            self._closed = True
            self._channel.close()
            if not self._open or not self.lives:
                self.process.kill()  # it may be importing, and would finish that first
        try:
            self.process.wait(REAP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Forked:
    """A `Life` that a fork server has made."""

    def __init__(self, server: _Server, number: int) -> None:
        self._server, self._number = server, number

    @property
    def pid(self) -> int | None:
        return self._server.pid(self._number)

    def kill(self) -> None:
        self._server.kill(self._number)

    def reap(self) -> int | None:
        return self._server.reap(self._number)


class ForkStandby:
    """A `Standby` on a fork server, which is replaced should it die."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._server: _Server | None = None
        self._closed = False

    def fork_self(self, engine: Engine) -> None:
        """`prepare` by a fork of this process; see fork_self.py for when that may be, and for what it raises."""
        with self._lock:
            self._server = _Server(*fork_self(engine))
            self._server.prepare(engine)

    def prepare(self, engine: Engine, count: int = 1) -> None:
        """One server makes any number."""
        with self._lock:
            self._prepared(engine)

    def take(self, engine: Engine) -> ReducerProcess:
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
            self._server = _Server(*start("trainctl.trainer.collective.forkserver", {**os.environ, **ENVIRONMENT}))
        self._server.prepare(engine)
        return self._server

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._server is not None:
                self._server.close()
                self._server = None


_POLL_SECONDS = 0.002


class ForkedServer:
    """A child of this process, with what is used of a `subprocess.Popen`; from any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None as long as it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
            return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status. Raises subprocess.TimeoutExpired."""
        due = float("inf") if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() >= due:
                raise subprocess.TimeoutExpired("fork server", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return status


def fork_self(engine: Engine) -> tuple[ForkedServer, Channel]:
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
    return ForkedServer(pid), Channel(ours)


def _be_server(ours: socket.socket, theirs: socket.socket, trainer: int) -> NoReturn:
    try:
        ours.close()
        os.dup2(2, 1)  # its output goes where the trainer's own does: the log
        forkserver.serve(Channel(theirs), trainer)
    finally:
        os._exit(1)
