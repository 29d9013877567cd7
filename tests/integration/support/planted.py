"""A terminal that shows a live run's diagnosis, and control groups with a CPU quota, for tests that plant a cause."""

import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import psutil
from tests.integration.support.terminals import TRAINCTL, Terminal
from tests.lacking import cpu_groups
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
        try:
            if "five keys" in self.terminal.wait_for(r"RUNNING|PAUSED|five keys to begin with"):
                self.terminal.keys("Escape")
            self.terminal.wait_for(r"RUNNING|PAUSED")
            self.terminal.keys("D")
            self.terminal.wait_for(r"diagnosis of steps")
        except BaseException:
            self.terminal.close()
            raise

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
    """What a live run's agent finds now."""
    found: m.Diagnosis = client.diagnosis().diagnosis
    return {finding.cause for finding in found.findings}


def wait_until_judged(client: BlockingClient) -> None:
    """Until there are enough steps of the present plan."""
    until(lambda: client.diagnosis().diagnosis.step_seconds is not None, 60, "enough steps", lambda: _step(client))


def _step(client: BlockingClient) -> int:
    run = client.snapshot(0).run
    return run.step if run is not None else 0


class QuotaGroup:
    """A control group; `close` moves its processes out and removes it."""

    def __init__(self, name: str) -> None:
        self.folder = cpu_groups() / name
        self.folder.mkdir()

    def take(self, pids: Iterable[int]) -> None:
        """Trainers with all that they have started."""
        for pid in pids:
            for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
                (self.folder / "cgroup.procs").write_text(str(process.pid))

    def limit(self, part: float) -> None:
        """To a part of one processor."""
        quota = int(part * PERIOD_MICROSECONDS)
        if (self.folder / "cpu.max").exists():
            (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota))

    def close(self) -> None:
        for pid in (self.folder / "cgroup.procs").read_text().split():
            (cpu_groups() / "cgroup.procs").write_text(pid)
        self.folder.rmdir()
