"""Energy that a machine's devices draw during a run, summed over the time for which their power was read."""

import dataclasses
from collections.abc import Iterable

from trainctl.protocol import messages as m

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
        """Whether it is this run that is counted for."""
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


def drawn_watts(gpus: Iterable[m.GpuReading]) -> float | None:
    """By all devices whose power can be read; None if that is none."""
    known = [gpu.power_watts for gpu in gpus if gpu.power_watts is not None]
    return sum(known) if known else None


def counted(reading: m.HostReading | None, gap_seconds: float) -> Energy | None:
    """What an agent before this one had counted, `gap_seconds` ago."""
    if reading is None or reading.energy_since_at is None:
        return None
    gap_seconds += reading.energy_gap_seconds
    return Energy(reading.energy_since_at, reading.energy_joules, gap_seconds)
