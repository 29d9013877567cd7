"""Copies of checkpoints to another place: starts the process that makes them, and passes on what it says."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_file import COPY_COMMAND, is_rsync_target
from trainctl.protocol.config.run_tables import CheckpointTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.checkpoints.background import NICENESS
from trainctl.trainer.checkpoints.copy_process import Line
from trainctl.trainer.common.logs import log

COMMAND_VARIABLE = "TRAINCTL_COPY_COMMAND"
"""Environment variable of the node with the command that copies. A run file can't set it."""
LAST_SECONDS = 3.0
"""Seconds that a leaving trainer waits for a copy to end, so that its event is in the record; then the copy continues
without it."""


class Copies:
    """`start` and `close` are for any one thread at a time; `send` takes messages to the agent."""

    def __init__(
        self, run: str, rank: int, directory: Path, table: CheckpointTable, send: Callable[[m.FromTrainer], None]
    ) -> None:
        self._run, self._rank, self._send = run, rank, send
        self._target = table.copy_to
        where = ["--", *_command()] if table.copy_to == COPY_COMMAND else ["--to", table.copy_to]
        self._argv = [
            sys.executable, "-m", "trainctl.trainer.checkpoints.copy_process", str(directory), *where
        ]  # fmt: skip
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_wanted = False  # a checkpoint has been completed since the process began to look for one

    def start(self) -> None:
        """Have the newest checkpoint copied, now or after the one before; returns at once."""
        if not self._target:
            return
        with self._lock:
            self._is_wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="copies", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Wait a while for a copy."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(LAST_SECONDS)
            if thread.is_alive():
                log.info("the copy of the checkpoint continues without this trainer")

    def _follow(self) -> None:
        while True:
            with self._lock:
                if not self._is_wanted:
                    self._thread = None
                    return
                self._is_wanted = False
            self._copy_once()

    def _copy_once(self) -> None:
        try:
            process = subprocess.Popen(
                self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True, text=True,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )  # fmt: skip
        except OSError as error:
            log.error("checkpoints can't be copied: %s", error)
            return
        with process:
            _lower_priority(process.pid)
            assert process.stdout is not None
            for text in process.stdout:
                with contextlib.suppress(msgspec.MsgspecError):  # a line that its end has cut off
                    self._pass_on(msgspec.json.decode(text, type=Line))

    def _pass_on(self, line: Line) -> None:
        if line.state == "failed":
            log.error("checkpoint of step %s not copied to %s: %s", f"{line.step:,}", self._target, line.problem)
        self._send(
            m.CheckpointCopy(
                run=self._run,
                rank=self._rank,
                step=line.step,
                to=self._target,
                state=line.state,
                seconds=line.seconds,
                problem=line.problem,
            )
        )


def check(table: CheckpointTable, where: str) -> None:
    """Whether this machine has what the copies need. Raises InvalidInputError."""
    if is_rsync_target(table.copy_to) and shutil.which("rsync") is None:
        raise InvalidInputError(f"{where}: checkpoint.copy_to", "rsync is not installed on this node; install it")
    if table.copy_to != COPY_COMMAND:
        return
    command, field = _command(), f"{where}: checkpoint.copy_to"
    if not command:
        problem = f"this node has no command: set it with trainctl-agent install --env {COMMAND_VARIABLE}=..."
        raise InvalidInputError(field, problem)
    if shutil.which(command[0]) is None:
        problem = f"{COMMAND_VARIABLE}: {command[0]!r} is no program on this node's PATH; install it, or give its path"
        raise InvalidInputError(field, problem)


def _command() -> list[str]:
    try:
        return shlex.split(os.environ.get(COMMAND_VARIABLE, ""))
    except ValueError:  # an open quotation mark
        return []


def _lower_priority(pid: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, pid, NICENESS)
    except OSError:
        return
