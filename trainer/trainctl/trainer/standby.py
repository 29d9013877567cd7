"""A trainer's reducer processes: one kept ready with its engine imported, and the one that is in a group."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import Engine
from trainctl.trainer.channel import Channel, Failed, Join, Prepare, Reduce
from trainctl.trainer.ledger import AbandonedError

_REAP_SECONDS = 10.0


class GroupError(TrainctlError):
    """Joining, levelling or summing failed; what this rank holds is as it was."""


class ReducerProcess:
    """One reducer. Made on any thread; `kill` on any thread; all else on the thread that sums."""

    def __init__(self) -> None:
        """Raises GroupError if no process can be had."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "trainctl.trainer.reducer", "--channel", str(theirs.fileno())]
        try:
            # Its output goes where the trainer's own does: the log.
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, stderr=2
            )
        except OSError as error:
            ours.close()
            raise GroupError(f"no reducer can be started: {error}") from None
        finally:
            theirs.close()
        self._channel = Channel(ours)
        self._prepared: set[Engine] = set()
        self.killed = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def prepare(self, engine: Engine) -> None:
        """Have it import an engine, if it hasn't been told to yet; returns at once."""
        if engine not in self._prepared:
            self._prepared.add(engine)
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
        try:
            answer = self._channel.next_answer(timeout_seconds)
        except EOFError:
            raise self._ended() from None
        if isinstance(answer, Failed):
            raise self._problem(answer.reason)

    def kill(self) -> None:
        """End it now, wherever it is, and make whoever waits for it give up."""
        self.killed = True
        self._process.kill()

    def close(self) -> None:
        """`kill`, and let go of what it leaves."""
        self.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)
        self._channel.close()

    def _ended(self) -> Exception:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)
        return self._problem(f"the reducer ended {_how(self._process.returncode)}")

    def _problem(self, reason: str) -> Exception:
        return AbandonedError() if self.killed else GroupError(reason)


class Standby:
    """At most one process that waits to be used; from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: ReducerProcess | None = None
        self._closed = False

    def prepare(self, engine: Engine) -> None:
        """Have a process that imports, or has imported, `engine`. Raises GroupError."""
        with self._lock:
            if self._closed:
                return
            if self._waiting is not None and not self._waiting.lives:
                self._waiting.close()
                self._waiting = None
            if self._waiting is None:
                self._waiting = ReducerProcess()
            self._waiting.prepare(engine)

    def take(self, engine: Engine) -> ReducerProcess:
        """The process that was waiting; it is the caller's from here on. Raises GroupError."""
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


def _how(status: int | None) -> str:
    if status is None:
        return "without a word"
    return f"with exit status {status}" if status >= 0 else f"by {signal.Signals(-status).name}"
