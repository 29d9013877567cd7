"""CPU quotas for processes by cgroups, v1 (cpu.cfs_quota_us) or v2 (cpu.max)."""

import contextlib
import os
import time
from pathlib import Path

import psutil

PERIOD_US = 20_000
"""Microseconds in which a process gets its part of a core."""
MOST_SHARES, MOST_WEIGHT = 262_144, 10_000
"""The highest priority of a cgroup, v1 and v2, beside those without a quota."""
_V1 = Path("/sys/fs/cgroup/cpu")


class Quota:
    """A cgroup that holds its processes to some of a core."""

    def __init__(self, cores: float, name: str = "") -> None:
        """Raises OSError where no cgroup can be made."""
        self._root = _V1 if _V1.is_dir() else Path("/sys/fs/cgroup")
        self._folder = self._root / f"trainctl-bench-{os.getpid()}{name}"
        self._folder.mkdir()
        try:
            shares, most = ("cpu.shares", MOST_SHARES) if self._root == _V1 else ("cpu.weight", MOST_WEIGHT)
            (self._folder / shares).write_text(str(most))  # the rest of the machine takes little of what it may use
            self.set(cores)
        except OSError:
            self._folder.rmdir()
            raise

    def hold(self, pid: int) -> None:
        """A process with all its threads and children, and those it will have."""
        process = psutil.Process(pid)
        for held in (process, *process.children(recursive=True)):
            (self._folder / "cgroup.procs").write_text(str(held.pid))

    def set(self, cores: float) -> None:
        """Hold the processes to so many cores from now on."""
        if self._root == _V1:
            (self._folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._folder / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD_US)))
        else:
            (self._folder / "cpu.max").write_text(f"{int(cores * PERIOD_US)} {PERIOD_US}")

    def remove(self) -> None:
        for _ in range(100):  # what is in it may start more processes, or end as it is moved
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (self._root / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(0.05)
        self._folder.rmdir()
