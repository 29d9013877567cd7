"""What a step takes each rank, by its reports: seconds a sample, or a curve, and a cost whatever its share."""

from collections import deque
from collections.abc import Iterable

from trainctl.protocol import messages as m
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel, Timing, fit, models

NEWEST = 8
"""Newest steps whose middle is a rank's pace."""
FEW = 4
"""Steps of one share and micro-batch that are kept when a rank has been given others: the newest, or the first."""
MOST_SEEN = 4
"""Pairs of share and micro-batch whose steps are kept."""


class Rates:
    """Kept by the conductor in memory; a rank has none before its first step or measurement."""

    def __init__(self) -> None:
        self._timings: dict[int, deque[Timing]] = {}
        self._measured: dict[int, float] = {}
        self._seen: dict[int, dict[tuple[int, int], list[Timing]]] = {}
        self._curves: dict[int, PassCurve] = {}

    def measured(self, rank: int, samples_per_second: float) -> None:
        """A rate that was timed by itself replaces what was known."""
        self._timings.pop(rank, None)
        self._measured[rank] = samples_per_second

    def reported(self, reports: Iterable[m.Report]) -> None:
        """Every rank's report of one whole step."""
        for report in reports:
            rows = self._timings.setdefault(report.rank, deque(maxlen=NEWEST))
            timing = Timing(report.own_samples, report.phases, 0 if report.replays else report.micro_batch)
            if rows and rows[-1].work != timing.work:
                self._note(report.rank, [row for row in rows if row.work == rows[-1].work])
            rows.append(timing)
            if report.rank in self._seen and [row.work for row in rows].count(timing.work) == FEW:
                self._note(report.rank, [row for row in rows if row.work == timing.work])

    def _note(self, rank: int, rows: list[Timing]) -> None:
        """Steps of one share and micro-batch, just before or after others: the rank was as fast in both."""
        seen = self._seen.setdefault(rank, {})
        seen.pop(rows[-1].work, None)
        seen[rows[-1].work] = rows[-FEW:]
        if len(seen) > MOST_SEEN:
            del seen[next(iter(seen))]
        curve = fit([row for kept in seen.values() for row in kept])
        if curve is not None:
            self._curves[rank] = curve
        else:
            self._curves.pop(rank, None)

    def of(self, ranks: Iterable[int]) -> dict[int, StepModel]:
        """Of the ranks that have a rate; one timed by itself counts with the least floor of the others."""
        wanted = {*ranks}
        found = models({rank: rows for rank, rows in self._timings.items() if rank in wanted}, self._curves)
        least = min((model.floor_seconds for model in found.values()), default=0.0)
        timed = {rank: StepModel.linear(rate, least) for rank, rate in self._measured.items() if rank in wanted}
        return timed | found
