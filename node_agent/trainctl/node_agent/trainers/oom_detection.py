"""Detection of trainers that ran out of memory: by their end, the kernel's kills and what they had last reported.

A bare SIGKILL says nothing: somebody may have sent it. Linux counts the processes that it kills for memory in the
trainer's cgroup, of version 1 or 2; where the kernel ends them otherwise, as on a Mac, what the trainer held when it
last reported has to tell. `recognised` is pure.
"""

import re
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainctl.protocol.machine.cgroups import PROC, groups

NEAR_PART = 0.95
"""Fraction of its cap above which a trainer may have died of the next allocation."""
ENDINGS = (-signal.SIGKILL, -signal.SIGABRT)
"""Exit statuses of a process that lack of memory ended from outside Python: the kernel's kill, and an uncaught
error."""
LOOK_SECONDS = 1.0
"""Seconds between two counts."""
WINDOW_SECONDS = 10.0
"""Seconds back to which the count of kills is compared: a kill is counted at once, but the process may take a while to
end."""

_KILLS = re.compile(rb"^oom_kill (\d+)$", re.MULTILINE)


@dataclass(frozen=True)
class Held:
    """Memory of a trainer's last step, in bytes: held after it, its peak, the cap; None where it can't tell."""

    used: float | None = None
    peak: float | None = None
    cap: float | None = None

    @property
    def is_near_cap(self) -> bool:
        most = max(self.used or 0, self.peak or 0)
        return bool(self.cap) and most >= NEAR_PART * (self.cap or 0)


@dataclass(frozen=True)
class Kills:
    """Numbers of processes killed by the kernel for memory where the trainer ran, just before its end and after it."""

    before: int
    after: int


def recognised(exit_status: int | None, kills: Kills | None, held: Held | None) -> str:
    """Return what says that it ran out of memory; empty if nothing does. `kills`, `held`: None if not known."""
    if exit_status == -signal.SIGKILL and kills is not None and kills.after > kills.before:
        return f"the kernel killed it for memory (oom_kill {kills.before} → {kills.after})"
    if exit_status in ENDINGS and held is not None and held.is_near_cap and held.cap is not None:
        most = max(held.used or 0, held.peak or 0)
        return f"it had last reported {most / 1e9:,.1f} of {held.cap / 1e9:,.1f} GB"
    return ""


class OomKills:
    """Counts around one trainer's end; `look` while it lives, `seen` when it is gone."""

    def __init__(self, proc: Path = PROC, clock: Callable[[], float] = time.monotonic) -> None:
        self._proc, self._clock = proc, clock
        self._pid: int | None = None
        self._file: Path | None = None
        self._counts: deque[tuple[float, int]] = deque()

    def look(self, pid: int) -> None:
        """It lives: note the count, for the time when it doesn't."""
        now = self._clock()
        if pid != self._pid:
            self._pid, self._file = pid, count_file(pid, self._proc)
            self._counts.clear()
        elif self._counts and now < self._counts[-1][0] + LOOK_SECONDS:
            return
        count = read_count(self._file)
        if count is not None:
            self._counts.append((now, count))
        while len(self._counts) > 1 and self._counts[1][0] <= now - WINDOW_SECONDS:
            self._counts.popleft()

    def seen(self) -> Kills | None:
        """Kills counted just before its end and by now, None where nothing could be read."""
        after = read_count(self._file)
        return Kills(self._counts[0][1], after) if self._counts and after is not None else None


def count_file(pid: int, proc: Path = PROC) -> Path | None:
    """The file that has the count of a process's cgroup; where that has none, of the whole machine. None elsewhere."""
    for group in groups(pid, "memory", proc):
        file = group.folder / ("memory.oom_control" if group.version == 1 else "memory.events")
        if read_count(file) is not None:
            return file
    machine = proc / "vmstat"
    return machine if read_count(machine) is not None else None


def read_count(file: Path | None) -> int | None:
    """Return the number after `oom_kill`; None if there is none."""
    try:
        text = file.read_bytes() if file is not None else b""
    except OSError:
        return None
    count = _KILLS.search(text)
    return int(count[1]) if count else None
