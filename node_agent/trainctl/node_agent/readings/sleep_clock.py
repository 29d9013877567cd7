"""Sleep of this machine: found by clocks of which some stop while it is suspended.

Linux has CLOCK_BOOTTIME, which counts a suspend, and CLOCK_MONOTONIC, which doesn't. On macOS CLOCK_MONOTONIC counts
it, and Python's own monotonic clock doesn't. A suspended virtual machine or a stopped process shows otherwise: the
agent didn't run for a while, and the wall clock moved on by more than the monotonic clock did. A wall clock that is
only set does not count as sleep.
"""

import sys
import time
from dataclasses import dataclass

LEAST_SECONDS = 2.0
"""Shorter differences between clocks are not called sleep."""
STOPPED_SECONDS = 2.0
"""An agent that didn't look for this long was stopped; it looks a few times a second."""
REPORT_SECONDS = 60.0
"""Seconds after waking for which a follower reports its sleep to the lead, which may have to reconnect first."""


@dataclass(frozen=True)
class Clocks:
    """All clocks at one moment, in seconds."""

    wall: float  # Unix
    monotonic: float  # Python's
    suspended: float | None  # counts also while the machine is suspended; None: there is no such clock


@dataclass(frozen=True)
class Sleep:
    """One sleep that is over."""

    seconds: float
    woke_at: float  # Unix seconds
    noticed_monotonic: float


def read() -> Clocks:
    """This machine's clocks now."""
    clock = getattr(time, "CLOCK_MONOTONIC" if sys.platform == "darwin" else "CLOCK_BOOTTIME", None)
    return Clocks(time.time(), time.monotonic(), time.clock_gettime(clock) if clock is not None else None)


class SleepClock:
    """Look at it a few times a second."""

    def __init__(self, now: Clocks) -> None:
        self._last = now
        self.newest: Sleep | None = None

    def look(self, now: Clocks) -> Sleep | None:
        """The sleep that has ended since the last look."""
        last, self._last = self._last, now
        seconds = slept_seconds(last, now)
        if seconds is None:
            return None
        self.newest = Sleep(seconds, now.wall, now.monotonic)
        return self.newest

    def reported(self, monotonic: float) -> Sleep | None:
        """The newest sleep, for a while after it ended."""
        newest = self.newest
        return newest if newest is not None and monotonic < newest.noticed_monotonic + REPORT_SECONDS else None


def slept_seconds(last: Clocks, now: Clocks) -> float | None:
    """Return how long the machine slept between two looks; None if it didn't."""
    passed = now.monotonic - last.monotonic
    if now.suspended is not None and last.suspended is not None:
        suspended = now.suspended - last.suspended
        if suspended - passed >= LEAST_SECONDS:
            return suspended
    by_wall = now.wall - last.wall
    return by_wall if passed >= STOPPED_SECONDS and by_wall - passed >= LEAST_SECONDS else None


def in_words(seconds: float) -> str:
    """Such as `10 min 5 s`, or `3 h 20 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
