"""A fork server made of the trainer's own process, so that what both need is imported once.

Importing torch takes 2 s of CPU and 140 MB, and a rank that comes back is waited for by all others.
"""

import gc
import importlib
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
from trainctl.trainer.collective.channel import Channel
from trainctl.trainer.common.errors import GroupError

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
