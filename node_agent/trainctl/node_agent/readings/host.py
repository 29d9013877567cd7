"""The machine's own state: processor, memory, disk, load and devices, each None where it cannot be read, never zero.

The energy that its devices draw during a run is summed over the time for which their power was read. The node's own
processes, the agent and each trainer with its shim and reducers, are read beside it.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import msgspec
import psutil

from trainctl.node_agent.readings.devices import Watch, watch_devices
from trainctl.node_agent.readings.kernel_counters import (
    PressureReader,
    RateMeter,
    SwapMeter,
    ThermalPressure,
    machine_totals,
)
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import process_title, shim
from trainctl.protocol.messages import GpuReading, HostReading, ProcessReading
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

GAP_SECONDS = 3.0
"""Seconds between two readings, which come at 1 Hz, above which the energy drawn between them is unknown."""


@dataclasses.dataclass(frozen=True)
class Energy:
    """Since a run began here."""

    since_at: float  # Unix seconds
    joules: float | None = None  # None: no power has been read
    gap_seconds: float = 0.0  # in which none was


class EnergyMeter:
    """One machine's, of the run that it takes part in; `now` is a reading of a monotonic clock, in seconds."""

    def __init__(self) -> None:
        self.energy: Energy | None = None  # None before the first run
        self._run = ""
        self._watts: float | None = None
        self._read: float | None = None  # when it was, by the clock

    def begin(self, run: str, at: float, before: Energy | None = None) -> None:
        """Count again for another run; `before`: what was counted for it up to a little while ago."""
        if run != self._run:
            self._run, self._watts, self._read = run, None, None
            self.energy = before or Energy(at)

    def is_of(self, run: str) -> bool:
        """Return whether it is this run that is counted for."""
        return run == self._run

    def pause(self) -> None:
        """No run is active: what was counted stays, and what comes now isn't any run's."""
        self._run, self._watts, self._read = "", None, None

    def add(self, watts: float | None, now: float) -> None:
        """A reading of what all devices draw together, None where none could be read."""
        before, read, self._watts, self._read = self._watts, self._read, watts, now
        if self.energy is None or not self._run or read is None:
            return
        seconds = max(0.0, now - read)
        if watts is None or before is None or seconds > GAP_SECONDS:
            joules = self.energy.joules if watts is None else self.energy.joules or 0.0
            self.energy = dataclasses.replace(self.energy, joules=joules, gap_seconds=self.energy.gap_seconds + seconds)
        else:
            joules = (self.energy.joules or 0.0) + seconds * (watts + before) / 2
            self.energy = dataclasses.replace(self.energy, joules=joules)


def drawn_watts(gpus: Iterable[GpuReading]) -> float | None:
    """By all devices whose power can be read; None if that is none."""
    known = [gpu.power_watts for gpu in gpus if gpu.power_watts is not None]
    return sum(known) if known else None


RESTART_SECONDS = 120.0
"""Seconds after which an earlier count belongs to an earlier life of the run and is not continued."""


class CpuMeter:
    """The share of all processors' time that was not idle, between one call and the next."""

    def __init__(self) -> None:
        self._before = _cpu_times()
        self.steal_percent: float | None = None
        """Percent of time given to others by a hypervisor, at the last call; None where the kernel doesn't count it."""

    def percent(self) -> float | None:
        """0 to 100; None if no time has been counted since the last call."""
        before, times = self._before, _cpu_times()
        seconds = times.total - before.total
        self.steal_percent = None
        if seconds <= 0:
            return None
        self._before = times
        if times.steal is not None and before.steal is not None:
            self.steal_percent = _percent(times.steal - before.steal, seconds)
        return _percent(times.busy - before.busy, seconds)


class HostReader:
    """Reads this machine; `path` is on the disk whose free space counts. Its `read` takes about a millisecond."""

    def __init__(self, node: str, path: Path, devices: Sequence[Watch] | None = None) -> None:
        self._node, self._path, self._cpu = node, path, CpuMeter()
        self._devices = watch_devices() if devices is None else tuple(devices)
        self._pressure, self._thermal, self._swap = PressureReader(), ThermalPressure(), SwapMeter()
        self._rates = RateMeter(partial(machine_totals, path))
        self._energy = EnergyMeter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, at: float, own_pids: Container[int] = (), trainer: int | None = None) -> HostReading:
        """Return a reading stamped `at`, in Unix seconds, without waiting for anything. Processes with `own_pids`
        aren't others on a GPU; `trainer` is one of them whose control group is read."""
        now, cpu_percent, memory, disk = (
            time.monotonic(),
            self._cpu.percent(),
            psutil.virtual_memory(),
            _disk(self._path),
        )
        latest = [watch.latest for watch in self._devices]
        temperatures = [each.temperature_celsius for each in latest if each.temperature_celsius is not None]
        gpus = tuple(_without(gpu, own_pids) for each in latest for gpu in each.gpus)
        self._energy.add(drawn_watts(gpus), now)
        energy = self._energy.energy
        return HostReading(
            node=self._node,
            read_at=at,
            cpu_percent=cpu_percent,
            memory_used_bytes=memory.total - memory.available,
            memory_total_bytes=memory.total,
            disk_free_bytes=disk[0],
            disk_total_bytes=disk[1],
            load_1min=_load(),
            temperature_celsius=max(temperatures, default=None),
            gpus=gpus,
            values=self._values(now, trainer),
            energy_joules=energy.joules if energy is not None else None,
            energy_since_at=energy.since_at if energy is not None else None,
            energy_gap_seconds=energy.gap_seconds if energy is not None else 0.0,
        )

    def _values(self, now: float, trainer: int | None) -> dict[str, float]:
        """Return metrics that have no field of their own, by name; what can't be read has no entry."""
        values = {**self._pressure.read(trainer), **self._swap.read(now), **self._rates.read(now)}
        single = {"thermal_pressure": self._thermal.level(), "cpu_steal_percent": self._cpu.steal_percent}
        return values | {name: float(value) for name, value in single.items() if value is not None}

    def count_for(self, run: str | None, at: float, record: RunPaths | None = None) -> None:
        """Count the energy that devices draw for a run, None if none is active; an agent that was restarted continues
        from what is in the run's record."""
        if run is None:
            self._energy.pause()
        elif not self._energy.is_of(run):
            self._energy.begin(run, at, _counted(record, self._node, at) if record is not None else None)

    def close(self) -> None:
        for watch in self._devices:
            watch.close()


def _counted(record: RunPaths, node: str, at: float) -> Energy | None:
    """Return what an agent before this one had counted, a little while ago."""
    try:
        with RecordReader(record) as reader:
            last = reader.last_host_reading(node)
    except InvalidInputError:
        return None
    if last is None or last.energy_since_at is None or not 0 <= at - last.read_at < RESTART_SECONDS:
        return None
    return Energy(last.energy_since_at, last.energy_joules, last.energy_gap_seconds + at - last.read_at)


def _without(gpu: GpuReading, pids: Container[int]) -> GpuReading:
    return msgspec.structs.replace(gpu, others=tuple(one for one in gpu.others if one.pid not in pids))


@dataclasses.dataclass(frozen=True)
class _CpuTimes:
    """Seconds summed over the processors since boot."""

    busy: float
    total: float
    steal: float | None


def _cpu_times() -> _CpuTimes:
    """Return the processors' times as of now. User time includes that of guests."""
    times = psutil.cpu_times()._asdict()
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return _CpuTimes(total - times["idle"] - times.get("iowait", 0.0), total, times.get("steal"))


def _percent(part: float, whole: float) -> float:
    return min(100.0, max(0.0, 100 * part / whole))


def _disk(path: Path) -> tuple[int | None, int | None]:
    """Bytes (free, all) of the disk that a path is on; of all those that this user can have."""
    try:
        found = psutil.disk_usage(str(path))
    except OSError:
        return None, None
    return found.free, found.used + found.free


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None


MOST_PROCESSES = 32
SETTLED_SECONDS = 60.0
"""Age of a trainer's record from which its processes are searched for, among all of the machine, less often."""
SEARCH_SECONDS = 30.0
"""Seconds between two such searches."""
_ROLES = {"fork server": "standby", "spare reducer": "standby", "reducer": "reducer"}
"""Role of a trainer's descendant by its title; the fork server counts as a spare one."""


@dataclass(frozen=True)
class _Known:
    process: psutil.Process
    role: str
    rank: int | None


class ProcessMeter:
    """`find` takes milliseconds and may be called from another thread; `read` takes some 50 µs a process."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = (_Known(psutil.Process(os.getpid()), "agent", None),)
        self._searched: tuple[list[tuple[Path, int]], float] = ([], float("-inf"))  # records, and when (monotonic)
        self._before: dict[int, tuple[float, float]] = {}  # pid -> (processor seconds, monotonic seconds)

    def find(self, directory: Path | None) -> None:
        """Find out which processes there are: of trainers those of the run that is in `directory`."""
        made, files = [self._known[0]], sorted(directory.glob("rank-*.process.json")) if directory is not None else []
        records, now = [(file, _written_ns(file)) for file in files], time.monotonic()
        are_settled = all(time.time() - written_ns / 1e9 > SETTLED_SECONDS for _, written_ns in records)
        if are_settled and records == self._searched[0] and now < self._searched[1] + SEARCH_SECONDS:
            return
        self._searched = records, now
        for file in files:
            with contextlib.suppress(psutil.Error, OSError, ValueError, KeyError):
                made += _tree(file)
        self._known = tuple(made[:MOST_PROCESSES])

    @property
    def pids(self) -> frozenset[int]:
        """Pids of all processes that there were at the last `find`."""
        return frozenset(known.process.pid for known in self._known)

    @property
    def trainers(self) -> tuple[int, ...]:
        """Pids of the trainers that there were at the last `find`."""
        return tuple(known.process.pid for known in self._known if known.role == "trainer")

    def read(self) -> tuple[ProcessReading, ...]:
        """One reading of each that lives; the processor's part is unknown at a process's first."""
        readings = []
        for known in self._known:
            with contextlib.suppress(psutil.Error, OSError):
                readings.append(self._read(known))
        alive = {reading.pid for reading in readings}
        self._before = {pid: before for pid, before in self._before.items() if pid in alive}
        return tuple(readings)

    def _read(self, known: _Known) -> ProcessReading:
        with known.process.oneshot():
            times, memory = known.process.cpu_times(), known.process.memory_info()
        pid, now, spent = known.process.pid, time.monotonic(), times.user + times.system
        percent = None
        if pid in self._before and now > self._before[pid][1]:
            percent = max(100 * (spent - self._before[pid][0]) / (now - self._before[pid][1]), 0.0)
        self._before[pid] = (spent, now)
        return ProcessReading(pid, known.role, known.rank, percent, memory.rss)


def _written_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0  # another trainer is just being started


def _tree(file: Path) -> Iterator[_Known]:
    """A trainer, its shim, and what it has started; nothing if the trainer is not the one in the file any more."""
    record = json.loads(file.read_text(encoding="utf-8"))
    pid, rank = record["pid"], int(file.name.split(".")[0].removeprefix("rank-"))
    if record["boot_id"] != shim.boot_id() or record["start_time"] is None or "exit_status" in record:
        return
    if shim.start_time(pid) != record["start_time"]:
        return
    trainer = psutil.Process(pid)
    yield _Known(trainer, "trainer", rank)
    with contextlib.suppress(psutil.Error):
        yield _Known(psutil.Process(record["keeper_pid"]), "keeper", rank)
    for child in trainer.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            yield _Known(child, _ROLES.get(process_title.role_of(child.cmdline()), "helper"), rank)
