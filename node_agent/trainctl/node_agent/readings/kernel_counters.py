"""Rates of the kernel's counters, Linux's pressure, and macOS's thermal pressure.

Each counter (swap, the disk that stores the runs, network interfaces and TCP) is a total since boot, named after the
metric that is its rate per second. What this system doesn't count has no entry, and a counter has no rate before its
second reading.

Pressure on the processor, disk and memory, and how often a control group's CPU quota stopped its processes, are read of
a trainer's control group, or of this process's own, which is usually the same; pressure is the machine's where the
group has none of its own. Elsewhere than on Linux there is nothing to read.

Thermal pressure is by how much macOS holds the chip back because of heat. Any user may read it: the state of a Darwin
notification (`notify(3)`), whose values are those of <OSThermalNotification.h> on a Mac: 0 nominal, 1 moderate, 2
heavy, 3 trapping, 4 sleeping.
"""

import contextlib
import ctypes
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from trainctl.protocol.machine.cgroups import PROC, Group, groups, lines_of

SECTOR_BYTES = 512
"""Size of the sectors that Linux counts, whatever the disk's own are."""
SYS = Path("/sys")
SWAP_LOOK_SECONDS = 60.0
"""Seconds between looks for swap space on a machine that has none."""

Totals = dict[str, float]


class RateMeter:
    """Turns totals into rates per second."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self._totals = totals
        self._before: Totals = {}
        self._read = float("-inf")

    @property
    def counts(self) -> bool:
        """Return whether there was a counter at the last reading."""
        return bool(self._before)

    def read(self, now: float) -> dict[str, float]:
        """Rates since the last reading; `now`: seconds by a monotonic clock. A counter that began again has none."""
        before, read, self._before, self._read = self._before, self._read, self._totals(), now
        if not 0 < now - read < float("inf"):
            return {}
        return {
            name: (total - before[name]) / (now - read)
            for name, total in self._before.items()
            if name in before and total >= before[name]
        }


def machine_totals(path: Path, proc: Path = PROC, sys_root: Path = SYS) -> Totals:
    """All counters of this machine; of disks the one that `path` is on."""
    return {**_disk(path, sys_root), **_network(sys_root), **_tcp(proc)}


class SwapMeter:
    """Swap space: how much is used, and how much goes in and out."""

    def __init__(self) -> None:
        self._used = 0.0
        self._look_due = float("-inf")
        self._rates = RateMeter(self._totals)

    def read(self, now: float) -> dict[str, float]:
        """By name of its metric; nothing on a machine without swap space."""
        if now < self._look_due:
            return {}
        rates = self._rates.read(now)
        if not self._rates.counts:
            self._look_due = now + SWAP_LOOK_SECONDS
            return {}
        return {"swap_used_bytes": self._used, **rates}

    def _totals(self) -> Totals:
        swap = psutil.swap_memory()
        self._used = float(swap.used)
        if not swap.total:
            return {}
        return {"swap_in_bytes_per_second": swap.sin, "swap_out_bytes_per_second": swap.sout}


def _disk(path: Path, sys_root: Path) -> Totals:
    """Fields 3, 7 and 10 of the device's statistics: sectors read and written, and milliseconds it was busy."""
    if sys.platform == "darwin":
        return _disks_on_macos()
    with contextlib.suppress(OSError, ValueError, IndexError):
        device = path.stat().st_dev
        file = sys_root / "dev" / "block" / f"{os.major(device)}:{os.minor(device)}" / "stat"
        fields = [int(word) for word in file.read_text(encoding="ascii").split()]
        return {
            "disk_read_bytes_per_second": fields[2] * SECTOR_BYTES,
            "disk_write_bytes_per_second": fields[6] * SECTOR_BYTES,
            "disk_busy_percent": fields[9] / 10,  # ms in a second to percent
        }
    return {}


def _disks_on_macos() -> Totals:
    """Return the totals of all disks together; how long they were busy isn't known."""
    counted = psutil.disk_io_counters()
    if counted is None:
        return {}
    return {"disk_read_bytes_per_second": counted.read_bytes, "disk_write_bytes_per_second": counted.write_bytes}


def _network(sys_root: Path) -> Totals:
    """Return the totals of hardware interfaces, so that no bridge over one counts twice; in a container of all."""
    every = {
        name: counted
        for name, counted in psutil.net_io_counters(pernic=True, nowrap=False).items()
        if name not in ("lo", "lo0")
    }
    hardware = [counted for name, counted in every.items() if _is_hardware(name, sys_root)]
    counted = hardware or list(every.values())
    if not counted:
        return {}
    return {
        "network_in_bytes_per_second": sum(one.bytes_recv for one in counted),
        "network_out_bytes_per_second": sum(one.bytes_sent for one in counted),
    }


@functools.lru_cache(64)
def _is_hardware(name: str, sys_root: Path) -> bool:
    if sys.platform == "darwin":
        return name.startswith("en")
    return (sys_root / "class" / "net" / name / "device").exists()


def _tcp(proc: Path) -> Totals:
    """Return the totals in two lines that begin with `Tcp:`: names, and then values."""
    rows = [line.split() for line in lines_of(proc / "net" / "snmp") if line.startswith("Tcp:")]
    known = dict(zip(*rows, strict=False)) if len(rows) == 2 else {}
    return {"retransmits_per_second": float(known["RetransSegs"])} if "RetransSegs" in known else {}


PRESSURES: Final = ("cpu", "io", "memory")


class PressureReader:
    """Reads them by name of their metrics; what the kernel doesn't report has no entry."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._placed = [""]  # lines of the process's cgroup file for which the groups were looked up
        self._pressures: dict[str, list[Path]] = {}  # files of each, the nearest first
        self._quotas: list[Path] = []  # files of the groups that may have a quota
        self._counted: tuple[int, int] | None = None  # periods of the quota, and those that it throttled

    def read(self, pid: int | None = None) -> dict[str, float]:
        """`cpu_pressure`, `io_pressure`, `memory_pressure` and `cpu_throttled_percent`, all in percent; `pid`: of the
        process whose group counts, None for this one."""
        process = str(pid or "self")
        placed = lines_of(self._proc / process / "cgroup")
        if placed != self._placed:  # mounts take long to read where there are many
            self._placed, self._counted = placed, None
            self._place(groups(process, "cpu", self._proc))
        found = {f"{name}_pressure": self._pressure(name) for name in PRESSURES}
        found["cpu_throttled_percent"] = self._throttled_percent()
        return {name: value for name, value in found.items() if value is not None}

    def _place(self, own: list[Group]) -> None:
        for name in PRESSURES:
            files = [group.folder / f"{name}.pressure" for group in own if group.version == 2]
            self._pressures[name] = [*files, self._proc / "pressure" / name]
        folders = dict.fromkeys(folder for group in own for folder in group.and_above)
        self._quotas = [folder / "cpu.stat" for folder in folders]

    def _pressure(self, name: str) -> float | None:
        files = self._pressures.get(name, ())
        return next((value for file in files if (value := _some_avg10(lines_of(file))) is not None), None)

    def _throttled_percent(self) -> float | None:
        """Return the throttled percent of the quota's periods since the last reading; None if there are none."""
        before, self._counted = self._counted, self._count()
        if before is None or self._counted is None:
            return None
        periods, throttled = (now - then for now, then in zip(self._counted, before, strict=True))
        return 100 * min(1.0, throttled / periods) if periods > 0 and throttled >= 0 else None

    def _count(self) -> tuple[int, int] | None:
        """Return (periods, throttled) of the most throttled group: the process's, or one that contains it."""
        counts = [count for file in self._quotas if (count := _periods(lines_of(file))) is not None]
        return max(counts, key=lambda count: count[1], default=None)


def _some_avg10(lines: list[str]) -> float | None:
    """Return the percent of the last 10 s in which at least one task was stalled, from `some avg10=1.23 avg60=...`."""
    words = next((line.split() for line in lines if line.startswith("some ")), [])
    with contextlib.suppress(ValueError):
        return next((float(word.removeprefix("avg10=")) for word in words if word.startswith("avg10=")), None)
    return None


def _periods(lines: list[str]) -> tuple[int, int] | None:
    known = dict(line.split(maxsplit=1) for line in lines if " " in line)
    with contextlib.suppress(KeyError, ValueError):
        return int(known["nr_periods"]), int(known["nr_throttled"])
    return None


NOTIFICATION: Final = b"com.apple.system.thermalpressurelevel"
LEVELS: Final = 5
"""Number of levels; a state that is none of them is ignored."""
_OK = 0
"""`NOTIFY_STATUS_OK`."""


class ThermalPressure:
    """Reads the level; a registration of the notification stays until the process ends."""

    def __init__(self, library: Any = None) -> None:
        """`library`: one with notify(3)'s functions; None: this system's own."""
        self._library = ctypes.CDLL(None) if library is None and sys.platform == "darwin" else library
        self._token = ctypes.c_int()
        known = self._library is not None
        self._known = known and self._library.notify_register_check(NOTIFICATION, ctypes.byref(self._token)) == _OK

    def level(self) -> int | None:
        """0 to 4; None elsewhere than on macOS, or if the system doesn't say."""
        state = ctypes.c_uint64()
        if not self._known or self._library.notify_get_state(self._token, ctypes.byref(state)) != _OK:
            return None
        return state.value if state.value < LEVELS else None
