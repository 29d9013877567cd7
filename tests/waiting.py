"""Waiting in tests: by how far a thing has come and by how busy the machine is, not by the clock alone."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainctl.protocol.machine.cgroups import cpu_quota

LEAST_SECONDS = 30.0
"""Shorter waits are given as long: a busy machine may take seconds to start a process."""
HANG_SECONDS = 600.0
"""For calls that take one number: after so long whatever is waited for hangs, however busy the machine is."""
PATIENT_MILLISECONDS = int(1000 * HANG_SECONDS)
MOST_RESTARTS = 10
"""A thing that gets on for so many times its patience and never comes to be isn't waited for any longer."""


def slowness() -> float:
    """Return how many processes want each core, 1 while there are cores to spare: by so much is everything slower. The
    mean of the last minute, or the number now if that is larger: when a suite begins, the mean is still that of a quiet
    one."""
    return max(1.0, max(os.getloadavg()[0], runnable()) / cores())


@functools.cache
def cores() -> float:
    """Those that this process may use, at most as many as its control group's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(usable), cpu_quota() or math.inf)


def runnable() -> float:
    """Return how many processes want a core at this moment; 0 where the system doesn't say."""
    with contextlib.suppress(OSError):
        return float(Path("/proc/loadavg").read_text("ascii").split()[3].partition("/")[0])
    return 0.0


class Patience:
    """A deadline in seconds of a machine that is not busy; each sign of progress starts it again."""

    def __init__(self, seconds: float, least_seconds: float = LEAST_SECONDS) -> None:
        self._seconds, self._looked = max(seconds, least_seconds), time.monotonic()
        self._waited = self._in_all = 0.0
        self._seen: Any = None

    def is_over(self, progress: Any = None) -> bool:
        """Call it again and again; `progress`: what differs from the last time if something has moved."""
        now = time.monotonic()
        passed, self._looked = (now - self._looked) / slowness(), now
        self._in_all += passed
        self._waited = self._waited + passed if progress == self._seen else 0.0
        self._seen = progress
        return self._waited > self._seconds or self._in_all > MOST_RESTARTS * self._seconds


def until(
    condition: Callable[[], Any], seconds: float = 60.0, what: str = "it", progress: Callable[[], Any] = lambda: None
) -> Any:
    """Return what `condition` gives once it is true. Fails after so many seconds without progress. What doesn't come
    soon is asked for less often, for asking takes CPU from what is waited for."""
    begun, patience = time.monotonic(), Patience(seconds)
    while not (found := condition()):
        seen = progress()
        if patience.is_over(seen):
            waited = time.monotonic() - begun
            raise AssertionError(f"{what} did not come within {waited:.0f} s, {seconds:g} s on a quiet machine: {seen}")
        time.sleep(0.02 if time.monotonic() - begun < 1 else 0.04)
    return found
