"""A terminal that shows a live run's diagnosis, and what tests plant: control groups with limits, and busy loops."""

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil
from tests.asking import run_of
from tests.integration.support.terminals import TRAINCTL, Terminal
from tests.lacking import cpu_groups, disk_groups, disk_of
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient

PERIOD_MICROSECONDS = 100_000
BUSY = {"stolen-cpu"}
"""Causes that a busy machine has by itself."""


class Screen:
    """The Diagnosis screen of a live run, in a terminal of its own."""

    def __init__(self, folder: Path, address: str, before: Sequence[str] = ()) -> None:
        """`before`: the command line goes after it, as in a network namespace."""
        words = [*before, *shlex.split(TRAINCTL), "--connect", address]
        self.terminal = Terminal(folder, 120, 40, shlex.join(words))
        with contextlib.ExitStack() as undo:
            undo.callback(self.terminal.close)
            if "five keys" in self.terminal.wait_for(r"RUNNING|PAUSED|five keys to begin with"):
                self.terminal.keys("Escape")
            self.terminal.wait_for(r"RUNNING|PAUSED")
            self.terminal.keys("D")
            self.terminal.wait_for(r"diagnosis of steps")
            undo.pop_all()

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *_: object) -> None:
        self.terminal.close()

    def shows(self, words: str, plant: Callable[[], object] = lambda: None) -> float:
        """Seconds from a cause until the screen has `words`, a pattern, in its list of findings."""
        plant()
        began = time.monotonic()
        self.terminal.wait_for(rf"(error|warning|info) +{words}")
        return time.monotonic() - began


def causes(client: BlockingClient) -> set[str]:
    """Return what a live run's agent finds now."""
    found: m.Diagnosis = client.ask(m.DiagnosisRequest).diagnosis
    return {finding.cause for finding in found.findings}


def wait_until_judged(client: BlockingClient) -> None:
    """Until there are enough steps of the present plan."""
    until(
        lambda: client.ask(m.DiagnosisRequest).diagnosis.step_seconds is not None,
        60,
        "enough steps",
        lambda: _step(client),
    )


def _step(client: BlockingClient) -> int:
    run = run_of(client)
    return run.step if run is not None else 0


class ControlGroup:
    """A control group that limits what its processes use; `close` moves them out and removes it."""

    def __init__(self, groups: Path, name: str) -> None:
        self._groups, self.folder = groups, groups / name
        self.folder.mkdir()

    def take(self, pids: Iterable[int]) -> None:
        """Trainers with all that they have started."""
        for pid in pids:
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                (self.folder / "cgroup.procs").write_text(str(process.pid))

    def close(self) -> None:
        for pid in (self.folder / "cgroup.procs").read_text().split():
            (self._groups / "cgroup.procs").write_text(pid)
        self.folder.rmdir()


class QuotaGroup(ControlGroup):
    """One with a CPU quota."""

    def __init__(self, name: str) -> None:
        super().__init__(cpu_groups(), name)

    def limit(self, part: float) -> None:
        """To a part of one processor."""
        quota = int(part * PERIOD_MICROSECONDS)
        if (self.folder / "cpu.max").exists():
            (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))


class DiskGroup(ControlGroup):
    """One that reads slowly from the disk of a folder."""

    def __init__(self, name: str, of: Path) -> None:
        super().__init__(disk_groups(), name)
        self._disk = disk_of(of)

    def limit(self, bytes_per_second: int) -> None:
        old = self.folder / "blkio.throttle.read_bps_device"
        if old.exists():
            old.write_text(f"{self._disk} {bytes_per_second}")
        else:
            (self.folder / "io.max").write_text(f"{self._disk} rbps={bytes_per_second}")


def forget(folder: Path) -> None:
    """Let the system read the folder's files from the disk again."""
    for path in (path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class BusyLoops:
    """Processes that want a processor for themselves, each in a session of its own, because Linux may share processors
    among sessions; `close` ends them."""

    def __init__(self, processor: int, count: int) -> None:
        loop = f"import os\nos.sched_setaffinity(0, {{{processor}}})\nwhile True: pass"
        self._processes = [subprocess.Popen([sys.executable, "-c", loop], start_new_session=True) for _ in range(count)]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
