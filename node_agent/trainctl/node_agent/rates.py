"""What each rank would do alone: its own samples per second, as an exponential mean over its steps."""

from collections.abc import Iterable

from trainctl.protocol import messages as m

WEIGHT_OF_NEWEST = 0.25
"""Half of the mean is of the newest three steps, nine tenths of the newest eight."""


class Rates:
    """Kept by the conductor in memory; a rank has none before its first step or measurement."""

    def __init__(self) -> None:
        self._means: dict[int, float] = {}

    def measured(self, rank: int, samples_per_second: float) -> None:
        """A rate that was timed by itself replaces what was known."""
        self._means[rank] = samples_per_second

    def reported(self, report: m.Report) -> None:
        """A whole share of a step, over the time that reading, forward and backward took."""
        phases = report.phases
        busy_seconds = phases.data + phases.forward + phases.backward
        if busy_seconds > 0 and report.own_samples:
            newest = report.own_samples / busy_seconds
            before = self._means.get(report.rank, newest)
            self._means[report.rank] = before + WEIGHT_OF_NEWEST * (newest - before)

    def of(self, ranks: Iterable[int]) -> dict[int, float]:
        """Samples per second of those of the ranks that have a rate."""
        return {rank: self._means[rank] for rank in ranks if rank in self._means}
