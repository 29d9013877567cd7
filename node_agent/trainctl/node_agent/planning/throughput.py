"""Throughput of each rank: its own samples per second, and a step's fixed cost whatever its share."""

from collections import deque
from collections.abc import Iterable, Mapping

from trainctl.protocol import messages as m
from trainctl.protocol.batch.apportion import Speed, Timing, speeds

NEWEST = 8
"""Newest steps whose median is a rank's rate."""


class Rates:
    """Kept by the conductor in memory; a rank has none before its first step or measurement."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[int, m.Report]] = deque(maxlen=NEWEST)  # of the same ranks, not in _timings yet
        self._timings: dict[int, deque[Timing]] = {}
        self._measured: dict[int, float] = {}

    def measured(self, rank: int, samples_per_second: float) -> None:
        """A rate that was timed by itself replaces what was known."""
        self._take_steps()
        self._timings.pop(rank, None)
        self._measured[rank] = samples_per_second

    def reported(self, reports: Mapping[int, m.Report]) -> None:
        """Every rank's report of one whole step. They are read when a rate is wanted."""
        if self._steps and self._steps[-1].keys() != reports.keys():
            self._take_steps()
        self._steps.append(reports)

    def _take_steps(self) -> None:
        for reports in self._steps:
            for rank, report in reports.items():
                rows = self._timings.setdefault(rank, deque(maxlen=NEWEST))
                rows.append(Timing(report.own_samples, report.phases))
        self._steps.clear()

    def of(self, ranks: Iterable[int]) -> dict[int, Speed]:
        """Of the ranks that have a rate; one timed by itself counts with the least floor of the others."""
        self._take_steps()
        wanted = {*ranks}
        found = speeds({rank: rows for rank, rows in self._timings.items() if rank in wanted})
        least = min((speed.floor_seconds for speed in found.values()), default=0.0)
        timed = {rank: Speed(rate, least) for rank, rate in self._measured.items() if rank in wanted}
        return timed | found
