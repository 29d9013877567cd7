"""Peak memory of each rank by micro-batch, from its calibration and its reported steps."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainctl.protocol.batch.memory_estimate import MemoryModel, fit
from trainctl.protocol.calibration.peak import MAX_CAP_PART
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.messages import Ready, Report, peak_bytes

NEWEST = 4
"""Newest steps of one micro-batch whose median peak counts."""
MOST_SIZES = 8
"""Micro-batches of a rank whose peaks are kept, the newest ones."""
LEAST_RISE = 0.1
"""Part by which the largest micro-batch must rise to count: peaks differ a little from step to step."""


@dataclass(frozen=True)
class Peak:
    """A rank's predicted peak memory, and its cap if it has one."""

    bytes: float
    cap_bytes: float | None
    is_bound: bool = False  # at most that


class MemoryPeaks:
    """Kept by the conductor in memory; a rank has no model before its peaks at two micro-batches are known."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[int, Report]] = deque(maxlen=NEWEST)  # of one plan version, not in _reported yet
        self._version = 0
        self._reported: dict[int, dict[int, deque[float]]] = {}
        self._profiles: dict[int, ProfileSummary] = {}
        self._calibrated: dict[int, MemoryModel | None] = {}
        self._tried: dict[int, int] = {}  # the largest micro-batch that a calibration ran
        self._caps: dict[int, float] = {}
        self._most: dict[int, int] = {}  # the largest micro-batch, as last answered
        self._copies: dict[int, int] = {}  # bytes of the copy that a checkpoint is written from
        self._pids: dict[int, int] = {}
        self._shows_copy: set[int] = set()  # ranks whose peaks would have the copy
        self._has_copy: set[int] = set()  # ranks whose peaks have it

    def loaded(self, ready: Ready, copied_bytes: int) -> None:
        """A rank's process says what it has loaded, perhaps again. Its first checkpoint makes the copy, and it keeps
        it. On a CPU, peaks are of the whole process and have it then."""
        if self._pids.get(ready.rank) != ready.pid:
            self._pids[ready.rank] = ready.pid
            self._has_copy.discard(ready.rank)
        self._copies[ready.rank] = copied_bytes
        if ready.device.startswith("cpu"):
            self._shows_copy.add(ready.rank)
        if ready.profile is not None:
            self.calibrated(ready.rank, ready.profile, ready.memory_cap_bytes)

    def copied(self, ranks: Iterable[int]) -> None:
        """These have copied their state: peaks of their steps before that don't count any more."""
        for rank in self._shows_copy.intersection(ranks) - self._has_copy:
            self._take_steps()
            self._reported.pop(rank, None)
            self._has_copy.add(rank)

    def calibrated(self, rank: int, profile: ProfileSummary, cap_bytes: int | None = None) -> None:
        """Peaks of single passes, of a process that trained alone; the rank itself may take `cap_bytes`."""
        self._caps.setdefault(rank, float(cap_bytes or 0))
        if self._profiles.get(rank) == profile:
            return
        peaks = [(each.micro, float(each.peak_bytes)) for each in profile.passes if each.peak_bytes]
        self._profiles[rank], self._calibrated[rank] = profile, fit(peaks)
        self._tried[rank] = max(each.micro for each in profile.passes)

    def reported(self, reports: Mapping[int, Report], plan_version: int) -> None:
        """Every rank's report of one whole step. They are read when a model is wanted, or the plan changes."""
        if plan_version != self._version:
            self._take_steps()
            self._version = plan_version
        self._steps.append(reports)

    def _take_steps(self) -> None:
        for reports in self._steps:
            for report in reports.values():
                self._take(report)
        self._steps.clear()

    def _take(self, report: Report) -> None:
        """One that repeated passes had several micro-batches."""
        self._caps[report.rank] = report.values.get("memory_cap_bytes", 0.0)
        peak, micro = peak_bytes(report.values), report.micro_batch
        if peak is None or not micro or report.replays:
            return
        sizes = self._reported.setdefault(report.rank, {})
        if micro not in sizes:
            sizes[micro] = deque(maxlen=NEWEST)
            if len(sizes) > MOST_SIZES:
                del sizes[next(iter(sizes))]
        sizes[micro].append(peak)

    def of(self, ranks: Iterable[int]) -> dict[int, MemoryModel]:
        """Return models of the ranks that are known: by their steps if those had different micro-batches, or as
        calibrated, through the peak of their steps. Of both the one where a sample takes more: a process may keep
        memory."""
        self._take_steps()
        models = {rank: self._model(rank) for rank in ranks}
        return {rank: model for rank, model in models.items() if model is not None}

    def predicted(self, rank: int, micro: int) -> Peak | None:
        """Return the peak of a rank's passes of `micro` samples: by its model, or at most that of a larger micro-batch
        that it has run; None if neither is known."""
        self._take_steps()
        model, cap = self._model(rank), self._caps.get(rank) or None
        reported = {size: statistics.median(rows) for size, rows in self._reported.get(rank, {}).items()}
        if micro in reported:
            return Peak(reported[micro], cap)
        if model is not None:
            return Peak(model.peak(micro), cap)
        larger = min((size for size in reported if size > micro), default=None)
        return Peak(reported[larger], cap, is_bound=True) if larger is not None else None

    def most_micro(self, rank: int) -> int | None:
        """The largest micro-batch that has been run, and is predicted to fit into the rank's memory; None if it wasn't
        calibrated. It rises only by `LEAST_RISE` or more, because the run's view is published when it changes."""
        self._take_steps()
        tried, model, cap = self._tried.get(rank), self._model(rank), self._caps.get(rank)
        if tried is None or model is None or not cap:
            return tried
        most, before = max(1, model.most(MAX_CAP_PART * cap, tried)), self._most.get(rank, 0)
        if most < before or most >= (1 + LEAST_RISE) * before:
            self._most[rank] = most
        return self._most[rank]

    def _model(self, rank: int) -> MemoryModel | None:
        copied_bytes = self._copies.get(rank, 0)
        to_come = 0 if rank in self._has_copy else copied_bytes
        peaks = [(micro, to_come + statistics.median(rows)) for micro, rows in self._reported.get(rank, {}).items()]
        calibrated, model = self._calibrated.get(rank), fit(peaks)
        if calibrated is not None:
            calibrated = calibrated._replace(base_bytes=calibrated.base_bytes + copied_bytes)
        if calibrated is None or not peaks:
            return model or calibrated
        is_steeper = model is not None and model.sample_bytes > calibrated.sample_bytes
        return model if is_steeper else calibrated.through(*max(peaks))
