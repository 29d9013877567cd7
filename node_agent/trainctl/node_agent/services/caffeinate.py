"""Keeps a Mac from going to sleep while it trains: one `caffeinate` for each trainer, which ends with it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterable, Mapping

import psutil

PROGRAM = "caffeinate"


def command(pid: int) -> list[str]:
    """No idle sleep as long as that process lives."""
    return [PROGRAM, "-i", "-w", str(pid)]


def to_begin(platform: str, trainers: Iterable[int], held: Iterable[int]) -> tuple[int, ...]:
    """The trainers (pids) for which the machine isn't kept awake yet, and should be."""
    return tuple(sorted(set(trainers) - set(held))) if platform == "darwin" else ()


class Caffeinate:
    """Keeps the machine awake by processes that outlive the agent, as trainers do; the next agent finds them."""

    def __init__(self, platform: str = sys.platform) -> None:
        self._platform = platform
        self._held: dict[int, subprocess.Popen[bytes] | None] = {}  # None: another agent has started it

    def keep(self, trainers: Iterable[int]) -> None:
        """Keep the machine awake for these, which live now. For any one thread; milliseconds when a trainer is new."""
        living = set(trainers)
        for pid, process in [*self._held.items()]:
            if process is not None and process.poll() is not None and pid in living:
                self._held[pid] = None  # it can't be had here: not to be tried again and again
            if pid not in living and (process is None or process.poll() is not None):
                del self._held[pid]
        begin = to_begin(self._platform, living, self._held)
        there = _commands_there() if begin else []
        for pid in begin:
            self._held[pid] = None if command(pid) in there else _started(pid)

    @property
    def held(self) -> Mapping[int, "subprocess.Popen[bytes] | None"]:
        return self._held


def _started(pid: int) -> "subprocess.Popen[bytes] | None":
    nothing = subprocess.DEVNULL
    try:
        return subprocess.Popen(command(pid), stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True)
    except OSError:
        return None


def _commands_there() -> list[list[str]]:
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == PROGRAM:
            with contextlib.suppress(psutil.Error):
                found.append(process.cmdline())
    return found
