"""Trainer processes of this node: started under a shim, found again by a restarted agent, ended by identity only.

Who ends one: the conductor decides (its `Kill` for one that hangs, `Leave` for one that should go), `kill` and
`kill_hung` ask the process to end, and `force_overdue`, the only place that sends SIGKILL, ends those that haven't.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.protocol.errors import RefusedError
from trainctl.protocol.machine import shim
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths

GRACE_SECONDS = 10.0
STACKS_SECONDS = 2.0
"""Seconds that a hung trainer has to write its stacks to its log before it is killed."""
TAIL_BYTES = 65536
STATUS_SECONDS = 0.05
"""Seconds one look waits for a dead trainer's exit status while its shim lives; usually it is there at once."""
SHIM_SECONDS = 10.0
"""Seconds within which a live shim writes its trainer's exit status, even on a busy machine."""

SIMULATED_NOTICE = "simulated run: no model was trained, and its loss is a formula's"
"""The first event of a run whose trainers are simulated."""

_Key = tuple[str, int]


@dataclass(frozen=True)
class HostedTrainer:
    """A trainer; `pid` and `started_at` (Unix seconds) are None while its shim is still beginning."""

    pid: int | None
    started_at: float | None
    command: tuple[str, ...]
    keeper_pid: int


@dataclass(frozen=True)
class _Ending:
    """A trainer that was told to end."""

    paths: RunPaths
    rank: int
    pid: int  # 0: it was only starting, so whichever it turns out to be
    due: float  # by the supervisor's clock; from then on it is forced


class TrainerSupervisor:
    """Hosts trainers by the files in their run directories; any number of hosts, one after another, see the same."""

    is_simulated = False
    """Return whether its trainers train nothing."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shims: dict[_Key, subprocess.Popen[bytes]] = {}
        self._ending: dict[_Key, _Ending] = {}
        self._handles: dict[tuple[int, float], int] = {}  # of processes found alive, by pid and start time
        self._ended = select.poll()  # says which of them have ended

    def start(
        self,
        run_paths: RunPaths,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        nice: int | None = None,
    ) -> None:
        """Start a rank's trainer in a session of its own, what it prints added to its log. `env` and `nice` None: as
        this process's.

        Raises RefusedError if the rank runs already, or no process can be started.
        """
        running = self.find(run_paths, rank)
        if running is not None:
            raise RefusedError(f"rank {rank} of {run_paths.directory.name} is already running, pid {running.pid}")
        record, log = run_paths.process(rank), run_paths.log(rank)
        # By its path, so that it needs nothing of `env`; -P keeps this folder's names off its import path.
        command = [sys.executable, "-P", shim.__file__, "--record", str(record), "--log", str(log)]
        command += ["--", *argv] if nice is None else ["--nice", str(nice), "--", *argv]
        self._ending.pop(_key(run_paths, rank), None)
        try:
            record.unlink(missing_ok=True)
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as output:
                self._shims[_key(run_paths, rank)] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
                )
        except OSError as error:
            raise RefusedError(f"rank {rank} of {run_paths.directory.name} cannot be started: {error}") from None

    def find(self, run_paths: RunPaths, rank: int) -> HostedTrainer | None:
        """The rank's trainer if it lives: same pid, start time and boot, and not a zombie.

        Raises OSError if this process has too many files open to tell: that is no sign of death.
        """
        self._reap()
        known = _read(run_paths, rank)
        if known is None:
            return self._starting(run_paths, rank)
        if not _lives(known):
            return None
        self._hold(known)
        return _trainer(known)

    def _hold(self, known: dict[str, Any]) -> None:
        process = known["pid"], known["start_time"]
        if process not in self._handles and hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._handles[process] = os.pidfd_open(known["pid"])
                self._ended.register(self._handles[process], select.POLLIN)

    def may_have_ended(self) -> bool:
        """Return whether a trainer that `find` saw alive may have ended since, by one system call; also True while one
        is told to end, and where the system has no handles of processes."""
        ended = {handle for handle, _ in self._ended.poll(0)}
        for handle in ended:
            self._ended.unregister(handle)
            os.close(handle)
        self._handles = {process: handle for process, handle in self._handles.items() if handle not in ended}
        return bool(ended or self._ending) or not self._handles

    def last(self, run_paths: RunPaths, rank: int) -> HostedTrainer | None:
        """Return the rank's newest trainer, whether it lives or not."""
        known = _read(run_paths, rank)
        return _trainer(known) if known is not None else None

    def exit_status(self, run_paths: RunPaths, rank: int) -> int | None:
        """Return how the rank's last trainer ended (negative: the signal); None if it lives, or no one was there to see
        it."""
        deadline = time.monotonic() + STATUS_SECONDS
        while self.is_ending(run_paths, rank) and time.monotonic() < deadline:
            time.sleep(0.005)
        status = (_read(run_paths, rank) or {}).get("exit_status")
        return status if isinstance(status, int) else None

    def is_ending(self, run_paths: RunPaths, rank: int) -> bool:
        """Return whether the rank's last trainer is dead, and its shim is still to write how it ended."""
        known = _read(run_paths, rank)
        if known is None or "exit_status" in known or _lives(known):
            return False
        return known["boot_id"] == shim.boot_id() and shim.start_time(known["keeper_pid"]) is not None

    def log_tail(self, run_paths: RunPaths, rank: int, lines: int) -> tuple[str, ...]:
        """The last lines the rank's trainers printed, within TAIL_BYTES."""
        try:
            with run_paths.log(rank).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
                text = file.read().decode("utf-8", errors="replace")
        except OSError:
            return ()
        return tuple(text.splitlines()[-lines:]) if lines > 0 else ()

    def kill(self, run_paths: RunPaths, rank: int, grace_seconds: float = GRACE_SECONDS) -> bool:
        """Tell the rank's trainer to end (SIGTERM); after `grace_seconds` `force_overdue` ends it.

        Returns at once, False if no trainer lives. One that has only begun to start is forced as soon as it has.
        """
        known = _read(run_paths, rank)
        if known is None and self._starting(run_paths, rank) is not None:
            self._ending[_key(run_paths, rank)] = _Ending(run_paths, rank, 0, self._clock())
            return True
        if known is None or not _signal(known, signal.SIGTERM):
            return False
        self._note_ending(run_paths, rank, known["pid"], grace_seconds)
        return True

    def kill_hung(self, run_paths: RunPaths, rank: int) -> bool:
        """Have the rank's trainer write the stacks of its threads to its log; after STACKS_SECONDS `force_overdue` ends
        it. Returns at once, False if no trainer lives."""
        known = _read(run_paths, rank)
        if known is None:
            return self.kill(run_paths, rank, 0.0)
        if not self.dump_stacks(run_paths, rank):
            return False
        self._note_ending(run_paths, rank, known["pid"], STACKS_SECONDS)
        return True

    def _note_ending(self, run_paths: RunPaths, rank: int, pid: int, seconds: float) -> None:
        """Asking again doesn't give a trainer more time."""
        self._ending.setdefault(_key(run_paths, rank), _Ending(run_paths, rank, pid, self._clock() + seconds))

    def force_overdue(self) -> None:
        """End (SIGKILL) the trainers that were told to end and haven't in time. Call it a few times a second. Raises
        OSError if this process has too many files open to tell which they are."""
        for key, ending in list(self._ending.items()):
            known = _read(ending.paths, ending.rank)
            if known is None and self._starting(ending.paths, ending.rank) is not None:
                continue
            if known is None or not _lives(known):
                del self._ending[key]
            elif ending.pid in (0, known["pid"]) and self._clock() >= ending.due:
                _signal(known, signal.SIGKILL)

    def dump_stacks(self, run_paths: RunPaths, rank: int) -> bool:
        """Have the rank's trainer write the stacks of its threads to its log; False if none lives. One that an earlier
        version started can't: the signal would end it."""
        known = _read(run_paths, rank)
        if known is None or not _lives(known):
            return False
        if known.get("stacks_signal") != shim.STACKS_SIGNAL:
            return True
        with contextlib.suppress(OSError), run_paths.log(rank).open("a", encoding="utf-8") as log:
            log.write(log_format.write(time.time(), "WARNING", "the agent ends this trainer; its threads:") + "\n")
        return _signal(known, shim.STACKS_SIGNAL)

    def _starting(self, run_paths: RunPaths, rank: int) -> HostedTrainer | None:
        begun = self._shims.get(_key(run_paths, rank))
        if begun is None or begun.poll() is not None:
            return None
        command = [str(part) for part in begun.args] if isinstance(begun.args, list) else []
        return HostedTrainer(None, None, tuple(command[command.index("--") + 1 :]), begun.pid)

    def _reap(self) -> None:
        """Collect shims that have ended, so that none stays behind as a zombie."""
        for key, begun in list(self._shims.items()):
            if begun.poll() is not None:
                del self._shims[key]


def _key(run_paths: RunPaths, rank: int) -> _Key:
    return str(run_paths.directory), rank


def _read(run_paths: RunPaths, rank: int) -> dict[str, Any] | None:
    """A process record, None if there is none or it is not whole. Raises OSError if too many files are open to tell."""
    file = run_paths.process(rank)
    try:
        state = file.stat()
        return _parsed(file, state.st_ino, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in shim.NO_DESCRIPTORS:
            raise
        return None


@functools.lru_cache(256)
def _parsed(file: Path, *_version: int) -> dict[str, Any] | None:
    """Parse a file once for each version of it: it is looked at several times a second."""
    known = json.loads(file.read_text(encoding="utf-8"))
    kinds = {"pid": int, "keeper_pid": int, "started_at": int | float, "boot_id": str, "command": list}
    whole = isinstance(known, dict) and all(isinstance(known.get(name), kind) for name, kind in kinds.items())
    return known if whole else None


def _trainer(known: dict[str, Any]) -> HostedTrainer:
    return HostedTrainer(known["pid"], known["started_at"], tuple(known["command"]), known["keeper_pid"])


def _lives(known: dict[str, Any]) -> bool:
    if "exit_status" in known or known["boot_id"] != shim.boot_id():
        return False
    began = shim.start_time(known["pid"])
    return began is not None and began == known.get("start_time")


def _signal(known: dict[str, Any], number: signal.Signals) -> bool:
    """Send a signal to the recorded process and to no other; False if it is dead."""
    if not _lives(known):
        return False
    try:
        if not hasattr(os, "pidfd_open"):
            os.kill(known["pid"], number)
            return True
        handle = os.pidfd_open(known["pid"])
    except ProcessLookupError:
        return False
    try:
        # The pid may have changed hands until it was opened; from here on the handle stands for one process.
        if not _lives(known):
            return False
        signal.pidfd_send_signal(handle, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
