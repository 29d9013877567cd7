"""The machine's own state: processor, memory, disk, load and devices, each None where it cannot be read, never zero."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
import psutil

from trainctl.node_agent.readings.devices import Watch, watch_devices
from trainctl.node_agent.readings.energy import Energy, EnergyMeter, counted, drawn_watts
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import HostReading
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

RESTART_SECONDS = 120.0
"""Seconds after which an earlier count belongs to an earlier life of the run and is not continued."""


class CpuMeter:
    """The share of all processors' time that was not idle, between one call and the next."""

    def __init__(self) -> None:
        self._busy, self._total = _cpu_times()

    def percent(self) -> float | None:
        """0 to 100; None if no time has been counted since the last call."""
        busy, total = _cpu_times()
        busy_delta, total_delta = busy - self._busy, total - self._total
        if total_delta <= 0:
            return None
        self._busy, self._total = busy, total
        return min(100.0, max(0.0, 100 * busy_delta / total_delta))


class HostReader:
    """Reads this machine; `path` is on the disk whose free space counts. Its `read` takes well under a millisecond."""

    def __init__(self, node: str, path: Path, devices: Sequence[Watch] | None = None) -> None:
        self._node, self._path, self._meter = node, path, CpuMeter()
        self._devices = watch_devices() if devices is None else tuple(devices)
        self._energy = EnergyMeter()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, at: float) -> HostReading:
        """A reading stamped `at`, in Unix seconds."""
        reading = read_host(self._node, at, self._path, self._meter, self._devices)
        self._energy.add(drawn_watts(reading.gpus), time.monotonic())
        if (energy := self._energy.energy) is None:
            return reading
        return msgspec.structs.replace(
            reading, energy_joules=energy.joules, energy_since_at=energy.since_at,
            energy_gap_seconds=energy.gap_seconds,
        )  # fmt: skip

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
    try:
        with RecordReader(record) as reader:
            last = reader.last_host_reading(node)
    except InvalidInputError:
        return None
    ago_seconds = at - last.read_at if last is not None else RESTART_SECONDS
    return counted(last, ago_seconds) if 0 <= ago_seconds < RESTART_SECONDS else None


def read_host(node: str, at: float, path: Path, meter: CpuMeter, devices: Sequence[Watch] = ()) -> HostReading:
    """One reading of this machine, without waiting for anything."""
    memory = psutil.virtual_memory()
    free, total = _disk(path)
    readings = [watch.latest for watch in devices]
    temperatures = [one.temperature_celsius for one in readings if one.temperature_celsius is not None]
    return HostReading(
        node=node, read_at=at, cpu_percent=meter.percent(), memory_used_bytes=memory.total - memory.available,
        memory_total_bytes=memory.total, disk_free_bytes=free, disk_total_bytes=total, load_1min=_load(),
        temperature_celsius=max(temperatures, default=None), gpus=tuple(gpu for one in readings for gpu in one.gpus),
    )  # fmt: skip


def _cpu_times() -> tuple[float, float]:
    """Seconds (busy, all) summed over the processors since boot. Guest time is counted in user time already."""
    times = psutil.cpu_times()._asdict()
    total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
    return total - times["idle"] - times.get("iowait", 0.0), total


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
