"""Copies of checkpoints to another place: starts the process that makes them, and passes on what it says."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_file import COPY_COMMAND, is_rsync_target
from trainctl.protocol.config.run_tables import CheckpointTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder, write_file
from trainctl.protocol.record import checkpoints
from trainctl.trainer.checkpoints.copy_process import Line
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log

COMMAND_VARIABLE = "TRAINCTL_COPY_COMMAND"
"""Environment variable of the node with the command that copies. A run file can't set it."""
NICENESS = 10
"""Niceness of the process that copies: it gets a tenth of what a training thread gets of a busy core."""
LAST_SECONDS = 3.0
"""Seconds that a leaving trainer waits for a copy to end, so that its event is in the record; then the copy continues
without it."""


class Copies:
    """`after`, `start` and `close` are for any one thread at a time; `send` takes messages to the agent."""

    def __init__(
        self, run: str, rank: int, checkpoints: Path, table: CheckpointTable, send: Callable[[m.FromTrainer], None]
    ) -> None:
        """`checkpoints`: the run's folder of them."""
        self._run, self._rank, self._send, self._folder = run, rank, send, checkpoints
        self._target = table.copy_to
        where = ["--", *_command()] if table.copy_to == COPY_COMMAND else ["--to", table.copy_to]
        self._argv = [
            sys.executable, "-m", "trainctl.trainer.checkpoints.copy_process", str(checkpoints.parent), *where
        ]  # fmt: skip
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_wanted = False  # a checkpoint has been completed since the process began to look for one
        self._expected = 0  # step of the newest one that this trainer has begun to write

    @contextlib.contextmanager
    def after(self, step: int) -> Iterator[None]:
        """Have a checkpoint copied that is written inside. If this trainer doesn't get so far, a later one of its rank
        does it."""
        if self._target:
            self._expect(step)
        yield
        self.start()

    def start(self) -> None:
        """Have the newest checkpoint copied, now or after the one before; returns at once."""
        if not self._target:
            return
        with self._lock:
            self._is_wanted = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="copies", daemon=True)
                self._thread.start()

    def resume(self) -> None:
        """Have the newest checkpoint copied if an earlier trainer of this rank has left that out."""
        pending = read_pending(self._folder) if self._target else None
        if pending is None or pending.rank != self._rank:
            return
        newest = newest_step(self._folder)
        if newest is not None and newest >= pending.step:
            log.info("the checkpoint of step %s has not been copied yet: copying it", f"{newest:,}")
            self.start()

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
            self._conclude(None, f"the process that copies couldn't be started: {first_line(error)}")
            return
        last: Line | None = None
        with process:
            _lower_priority(process.pid)
            assert process.stdout is not None
            for text in process.stdout:
                with contextlib.suppress(msgspec.MsgspecError):  # a line that its end has cut off
                    last = msgspec.json.decode(text, type=Line)
                    self._pass_on(last)
        if process.returncode:
            self._conclude(last, _ended_by(process.returncode))

    def _conclude(self, last: Line | None, problem: str) -> None:
        """The process ended by an error, after its `last` line: say so, unless it had said how the newest copy went."""
        step = last.step if last is not None and last.state == "copying" else newest_step(self._folder)
        has_said = last is not None and (last.state == "failed" or (last.state, last.step) == ("copied", step))
        if step is not None and not has_said:
            self._pass_on(Line(step, "failed", problem=problem))

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
        if line.state == "copied":
            with self._lock:
                self._note(self._expected if self._expected > line.step else None)

    def _expect(self, step: int) -> None:
        with self._lock:
            self._expected = step
            before = read_pending(self._folder)
            self._note(step if before is None or before.rank != self._rank else min(step, before.step))

    def _note(self, step: int | None) -> None:
        """Keep the lowest step whose checkpoint isn't known to be copied. A disk that refuses costs a copy after this
        trainer's end, not the checkpoint."""
        try:
            note_pending(self._folder, None if step is None else PendingCopy(self._rank, step))
        except OSError as error:
            log.warning("can't note which checkpoint has to be copied: %s", first_line(error))


def _ended_by(status: int) -> str:
    """Why the process that copies has ended, by its status as subprocess has it."""
    if status < 0:
        return f"the process that copies was ended by {signal.Signals(-status).name}"
    return f"the process that copies exited with {status}; its output is in the trainer's log"


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


PENDING: Final = ".copy-pending"
"""File in `checkpoints`; gone once the newest one is copied and the agent has been sent a message about that."""


class PendingCopy(msgspec.Struct, frozen=True):
    """Checkpoints from a step on aren't known to be copied."""

    rank: int  # rank whose trainer copies them
    step: int  # the lowest step


def read_pending(folder: Path) -> PendingCopy | None:
    """Return the copy that is pending in `checkpoints`; None if none is."""
    try:
        return msgspec.json.decode((folder / PENDING).read_bytes(), type=PendingCopy)
    except (OSError, msgspec.MsgspecError):
        return None


def note_pending(folder: Path, pending: PendingCopy | None) -> None:
    """Have the disk keep what is pending, as a whole or not at all; None: nothing. Raises OSError."""
    path = folder / PENDING
    if pending is None:
        path.unlink(missing_ok=True)
        return
    make_folder(path.parent)
    write_file(path, msgspec.json.encode(pending))


def newest_step(folder: Path) -> int | None:
    """The step of the newest complete checkpoint in `checkpoints`; None without one."""
    found = checkpoints.newest_complete(folder, hashes=False)
    try:
        return checkpoints.read_manifest(found).step if found is not None else None
    except InvalidInputError:  # it was removed meanwhile
        return None
