"""A reducer as its trainer sees it: orders and answers over a channel, and the process behind it."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Protocol

import psutil

from trainctl.protocol.machine.process_title import whose
from trainctl.protocol.messages import Engine
from trainctl.trainer.collective.channel import Born, Channel, Done, Failed, Gone, Join, Prepare, Reduce
from trainctl.trainer.common.errors import AbandonedError, EngineError, GroupError

REAP_SECONDS = 10.0
LOOK_SECONDS = 1.0
"""Seconds between looks at a reducer that is waited for."""
_POLL_SECONDS = 0.002


class Child:
    """A child of this process, from any thread. It stays a zombie, so that its process id is its own, until someone
    asks for its exit status."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None
        self._lock = threading.RLock()

    def poll(self) -> int | None:
        """Return its exit status, negative for a signal; None as long as it runs."""
        with self._lock:
            if self._status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = os.waitstatus_to_exitcode(status) if pid else None
            return self._status

    def kill(self) -> None:
        with self._lock:
            if self.poll() is None:
                os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """Return its exit status once it has ended, or None if it takes too long."""
        due = time.monotonic() + REAP_SECONDS
        while (status := self.poll()) is None and time.monotonic() < due:
            time.sleep(_POLL_SECONDS)
        return status


class Life(Protocol):
    """The process behind a reducer: a Child, or a fork server's. From any thread."""

    @property
    def pid(self) -> int | None:
        """Return the process's id; None as long as it isn't known."""

    def kill(self) -> None: ...
    def reap(self) -> int | None: ...


class ReducerProcess:
    """One reducer. `kill` on any thread; all else on the thread that sums."""

    def __init__(self, life: Life, channel: Channel) -> None:
        self.life, self._channel = life, channel
        self._status: int | None = None
        self.killed = self._reaped = False

    def prepare(self, engine: Engine) -> None:
        """Have it import an engine, once; returns at once."""
        with contextlib.suppress(OSError):  # one that is dead says so when it is asked to join
            self._channel.send(Prepare(engine))

    def order(self, order: Join | Reduce, descriptors: Sequence[int] = ()) -> None:
        """Send an order; returns at once. Raises as `wait`."""
        try:
            self._channel.send(order, descriptors)
        except OSError:
            raise self._ended() from None

    def wait(self, timeout_seconds: float | None) -> None:
        """Wait until the order has been carried out. Raises AbandonedError if the reducer was killed, GroupError if it
        failed or ended, TimeoutError if it takes longer (then it is of no use any more)."""
        due = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
        while not self._channel.has_answer(min(LOOK_SECONDS, max(0.0, due - time.monotonic()))):
            if time.monotonic() >= due:
                raise TimeoutError
            if is_stopped(self.life.pid):
                raise AbandonedError() if self.killed else GroupError("the reducer hung and was stopped")
        try:
            answer = self._channel.next_answer(REAP_SECONDS)
        except EOFError:
            raise self._ended() from None
        match answer:
            case Done():
                pass
            case Failed(reason=reason, peer=peer):
                raise AbandonedError() if self.killed else EngineError(reason, peer)
            case Born() | Gone():
                raise GroupError("the reducer answered as a fork server")

    def kill(self) -> None:
        """End it now, wherever it is, and make a thread that waits for it give up."""
        self.killed = True
        if not self._reaped:
            self.life.kill()

    def close(self) -> None:
        """`kill` it, and let go of what it leaves."""
        self.kill()
        self._reap()
        self._channel.close()

    def _reap(self) -> int | None:
        if not self._reaped:
            self._reaped, self._status = True, self.life.reap()
        return self._status

    def _ended(self) -> Exception:
        return AbandonedError() if self.killed else GroupError(f"the reducer ended {_how(self._reap())}")


def is_stopped(pid: int | None) -> bool:
    """Return whether a process is there and stopped, by a signal or a debugger."""
    if pid is None:
        return False
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _how(status: int | None) -> str:
    if status is None:
        return "without an exit status"
    return f"with exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"


def spawn() -> ReducerProcess:
    """Start a reducer that has imported nothing. Raises GroupError if no process can be had."""
    return ReducerProcess(*start(dict(os.environ)))


def start(environment: dict[str, str], *options: str) -> tuple[Child, Channel]:
    """Start reducer.py with a channel to it. Raises GroupError."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "trainctl.trainer.collective.reducer", "--channel", str(theirs.fileno())]
    theirs.set_inheritable(True)
    null = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    log = (os.POSIX_SPAWN_DUP2, 2, 1)  # its output goes where the trainer's own does
    try:
        pid = os.posix_spawn(
            sys.executable, [*command, "--whose", whose(), *options], environment, file_actions=[null, log]
        )
    except OSError as error:
        ours.close()
        raise GroupError(f"cannot start a reducer: {error}") from None
    finally:
        theirs.close()
    return Child(pid), Channel(ours)
