"""CPU and memory of this node's own processes: the agent, and each trainer with its shim and reducers."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainctl.protocol.machine import process_title, shim
from trainctl.protocol.messages import ProcessReading

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
