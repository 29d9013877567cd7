"""Linux's pressure on the processor, disk and memory, and how often a control group's CPU quota stopped its processes.

Both are read of a trainer's control group, or of this process's own, which is usually the same; pressure is the
machine's where the group has none of its own. Elsewhere than on Linux there is nothing to read.
"""

import contextlib
from pathlib import Path
from typing import Final

from trainctl.protocol.machine.cgroups import PROC, Group, groups, lines_of

PRESSURES: Final = ("cpu", "io", "memory")


class PressureReader:
    """Reads them by name of their metrics; what the kernel doesn't report has no entry."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._placed = [""]  # lines of the process's cgroup file for which the groups were looked up
        self._groups: list[Group] = []
        self._counted: tuple[int, int] | None = None  # periods of the quota, and those that it throttled

    def read(self, pid: int | None = None) -> dict[str, float]:
        """`cpu_pressure`, `io_pressure`, `memory_pressure` and `cpu_throttled_percent`, all in percent; `pid`: of the
        process whose group counts, None for this one."""
        process = str(pid or "self")
        placed = lines_of(self._proc / process / "cgroup")
        if placed != self._placed:  # mounts take long to read where there are many
            self._placed, self._groups, self._counted = placed, groups(process, "cpu", self._proc), None
        found = {f"{name}_pressure": self._pressure(name) for name in PRESSURES}
        found["cpu_throttled_percent"] = self._throttled_percent()
        return {name: value for name, value in found.items() if value is not None}

    def _pressure(self, name: str) -> float | None:
        own = [group.folder / f"{name}.pressure" for group in self._groups if group.version == 2]
        files = (*own, self._proc / "pressure" / name)
        return next((value for file in files if (value := _some_avg10(lines_of(file))) is not None), None)

    def _throttled_percent(self) -> float | None:
        """Of the quota's periods since the last reading; None without a quota, or if none of them has passed."""
        before, self._counted = self._counted, self._count()
        if before is None or self._counted is None:
            return None
        periods, throttled = (now - then for now, then in zip(self._counted, before, strict=True))
        return 100 * min(1.0, throttled / periods) if periods > 0 and throttled >= 0 else None

    def _count(self) -> tuple[int, int] | None:
        """(periods, throttled) of the most throttled group: the process's, or one that contains it."""
        folders = dict.fromkeys(folder for group in self._groups for folder in group.and_above)
        found = [count for folder in folders if (count := _periods(lines_of(folder / "cpu.stat"))) is not None]
        return max(found, key=lambda count: count[1], default=None)


def _some_avg10(lines: list[str]) -> float | None:
    """Of `some avg10=1.23 avg60=...`: percent of the last 10 s in which at least one task was stalled."""
    words = next((line.split() for line in lines if line.startswith("some ")), [])
    with contextlib.suppress(ValueError):
        return next((float(word.removeprefix("avg10=")) for word in words if word.startswith("avg10=")), None)
    return None


def _periods(lines: list[str]) -> tuple[int, int] | None:
    known = dict(line.split(maxsplit=1) for line in lines if " " in line)
    with contextlib.suppress(KeyError, ValueError):
        return int(known["nr_periods"]), int(known["nr_throttled"])
    return None
