"""Throughput of each rank: its own samples per second, and a step's fixed cost whatever its share."""

from collections import deque
from collections.abc import Iterable

from trainctl.protocol import messages as m
from trainctl.protocol.batch.apportion import Speed, Timing, speeds

NEWEST = 8
"""Newest steps whose median is a rank's rate."""


class Rates:
    """Kept by the conductor in memory; a rank has none before its first step or measurement."""

    def __init__(self) -> None:
        self._timings: dict[int, deque[Timing]] = {}
        self._measured: dict[int, float] = {}

    def measured(self, rank: int, samples_per_second: float) -> None:
        """A rate that was timed by itself replaces what was known."""
        self._timings.pop(rank, None)
        self._measured[rank] = samples_per_second

    def reported(self, reports: Iterable[m.Report]) -> None:
        """Every rank's report of one whole step."""
        for report in reports:
            rows = self._timings.setdefault(report.rank, deque(maxlen=NEWEST))
            rows.append(Timing(report.own_samples, report.phases))

    def of(self, ranks: Iterable[int]) -> dict[int, Speed]:
        """Of the ranks that have a rate; one timed by itself counts with the least floor of the others."""
        wanted = {*ranks}
        found = speeds({rank: rows for rank, rows in self._timings.items() if rank in wanted})
        least = min((speed.floor_seconds for speed in found.values()), default=0.0)
        timed = {rank: Speed(rate, least) for rank, rate in self._measured.items() if rank in wanted}
        return timed | found
