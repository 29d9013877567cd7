"""Rates of the kernel's counters: swap, the disk that stores the runs, network interfaces and TCP.

Each counter is a total since boot, named after the metric that is its rate per second. What this system doesn't count
has no entry, and a counter has no rate before its second reading.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from trainctl.protocol.machine.cgroups import PROC, lines_of

SECTOR_BYTES = 512
"""Size of the sectors that Linux counts, whatever the disk's own are."""
SYS = Path("/sys")

Totals = dict[str, float]


class RateMeter:
    """Turns totals into rates per second."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self._totals = totals
        self._before: Totals = {}
        self._read = float("-inf")

    @property
    def counts(self) -> bool:
        """Whether there was a counter at the last reading."""
        return bool(self._before)

    def read(self, now: float) -> dict[str, float]:
        """Rates since the last reading; `now`: seconds by a monotonic clock. A counter that began again has none."""
        before, read, self._before, self._read = self._before, self._read, self._totals(), now
        if not 0 < now - read < float("inf"):
            return {}
        return {
            name: (total - before[name]) / (now - read)
            for name, total in self._before.items() if name in before and total >= before[name]
        }  # fmt: skip


def machine_totals(path: Path, proc: Path = PROC, sys_root: Path = SYS) -> Totals:
    """All counters of this machine; of disks the one that `path` is on."""
    return {**_disk(path, sys_root), **_network(sys_root), **_tcp(proc)}


class SwapMeter:
    """Swap space: how much is used, and how much goes in and out."""

    def __init__(self) -> None:
        self._used = 0.0
        self._rates = RateMeter(self._totals)

    def read(self, now: float) -> dict[str, float]:
        """By name of its metric; nothing on a machine without swap space."""
        rates = self._rates.read(now)
        return {"swap_used_bytes": self._used, **rates} if self._rates.counts else {}

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
    """Of all disks together; how long they were busy isn't known."""
    counted = psutil.disk_io_counters()
    if counted is None:
        return {}
    return {"disk_read_bytes_per_second": counted.read_bytes, "disk_write_bytes_per_second": counted.write_bytes}


def _network(sys_root: Path) -> Totals:
    """Of the interfaces that are hardware, so that a bridge over one isn't counted twice; in a container of all."""
    every = {
        name: counted
        for name, counted in psutil.net_io_counters(pernic=True, nowrap=False).items()
        if not _is_loopback(name)
    }
    hardware = [counted for name, counted in every.items() if _is_hardware(name, sys_root)]
    counted = hardware or list(every.values())
    if not counted:
        return {}
    return {
        "network_in_bytes_per_second": sum(one.bytes_recv for one in counted),
        "network_out_bytes_per_second": sum(one.bytes_sent for one in counted),
    }


def _is_loopback(name: str) -> bool:
    return name in ("lo", "lo0")


def _is_hardware(name: str, sys_root: Path) -> bool:
    if sys.platform == "darwin":
        return name.startswith("en")
    return (sys_root / "class" / "net" / name / "device").exists()


def _tcp(proc: Path) -> Totals:
    """Of two lines that begin with `Tcp:`: names, and then values."""
    rows = [line.split() for line in lines_of(proc / "net" / "snmp") if line.startswith("Tcp:")]
    known = dict(_pairs(rows))
    return {"retransmits_per_second": float(known["RetransSegs"])} if "RetransSegs" in known else {}


def _pairs(rows: list[list[str]]) -> Iterator[tuple[str, str]]:
    yield from zip(*rows, strict=False) if len(rows) == 2 else ()
