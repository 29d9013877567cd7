"""Models of each rank, by its calibration and the steps that it reports: a step's time, and its peak memory."""

import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.memory_estimate import fit as fit_memory
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel, Timing, fit, middle, models
from trainctl.protocol.calibration.peak import MAX_CAP_PART
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.messages import Ready, Report, peak_bytes

GRADIENT_BYTES, STATE_BYTES = 4, 12
"""Bytes per parameter: a gradient in fp32; weights and two moments of 4 bytes each."""
LINK_BYTES_PER_SECOND = 10e6
"""Bytes per second of the slowest link that a group may form over, a tenth of a gigabit."""
DISK_BYTES_PER_SECOND = 100e6
"""Bytes per second of a slow disk or a network disk."""


def level_seconds(parameters: int) -> float:
    """Return the seconds that giving a whole state to others may take where nothing has been measured yet."""
    return parameters * STATE_BYTES / LINK_BYTES_PER_SECOND


def sum_seconds(parameters: int) -> float:
    """Return the seconds that a sum of all gradients may take; in a ring each of them passes a link twice."""
    return 2 * parameters * GRADIENT_BYTES / LINK_BYTES_PER_SECOND


def write_seconds(parameters: int) -> float:
    """Return the seconds that writing a checkpoint may take."""
    return parameters * STATE_BYTES / DISK_BYTES_PER_SECOND


# ---------------------------------------------------------------- time

NEWEST = 8
"""Newest steps whose middle is a rank's pace."""
FEW = 4
"""Steps of one share and micro-batch that are kept when a rank has been given others: the newest, or the first."""
MOST_SEEN = 4
"""Pairs of share and micro-batch whose steps are kept."""
MOVED = 0.05
"""Relative change of the seconds of one share and micro-batch by which a rank has another speed than before."""

PASS_NOISE = 0.02
"""Relative standard error of a calibrated pass; what is within it is smoothed."""

_SHARE_AND_MICRO = attrgetter("samples", "micro")


class Rates:
    """Kept by the conductor in memory; a rank has none before its first step, measurement or calibration."""

    def __init__(self) -> None:
        self._steps: deque[Mapping[int, Report]] = deque(maxlen=NEWEST)  # of one plan version, not in _timings yet
        self._version, self._has_begun = 0, False
        self._timings: dict[int, deque[Timing]] = {}
        self._measured: dict[int, tuple[float, int]] = {}  # samples per second, and of a pass
        self._profiles: dict[int, ProfileSummary] = {}
        self._seen: dict[int, dict[tuple[int, int], list[Timing]]] = {}
        self._fitted: dict[int, PassCurve] = {}
        self._calibrated: dict[int, PassCurve] = {}

    def calibrated(self, rank: int, profile: ProfileSummary) -> None:
        """The seconds of its passes by micro-batch, as they once were; its steps say how much slower it is now."""
        if self._profiles.get(rank) != profile:
            points = [(each.micro, each.seconds) for each in profile.passes]
            self._profiles[rank], self._calibrated[rank] = profile, PassCurve.smoothed(points, PASS_NOISE)

    def measured(self, rank: int, samples_per_second: float, micro: int) -> None:
        """A rate that was timed by itself, in passes of `micro` samples, replaces what was known."""
        self._take_steps()
        self._timings.pop(rank, None)
        self._measured[rank] = samples_per_second, micro

    def reported(self, reports: Mapping[int, Report], plan_version: int) -> None:
        """Every rank's report of one whole step. They are read when a model is wanted, or the plan changes."""
        if plan_version != self._version:
            self._take_steps()
            self._version, self._has_begun = plan_version, False
        elif not self._has_begun and len(self._steps) == FEW:  # the first ones too are compared with those before
            self._take_steps()
            self._has_begun = True
        self._steps.append(reports)

    def _take_steps(self) -> None:
        for rank in self._steps[-1] if self._steps else ():  # all are of the same ranks
            self._take(rank, [_timing(reports[rank]) for reports in self._steps])
        self._steps.clear()

    def _take(self, rank: int, timings: list[Timing]) -> None:
        """A rank's next steps, in order."""
        rows = self._timings.setdefault(rank, deque(maxlen=NEWEST))
        if rank not in self._seen and len({*map(_SHARE_AND_MICRO, rows), *map(_SHARE_AND_MICRO, timings)}) == 1:
            rows.extend(timings)  # as nearly always: they did what those before did
            return
        for timing in timings:
            if rows and rows[-1].work != timing.work:
                self._note(rank, [row for row in rows if row.work == rows[-1].work])
            rows.append(timing)
            if rank in self._seen and [row.work for row in rows].count(timing.work) == FEW:
                self._note(rank, [row for row in rows if row.work == timing.work])

    def _note(self, rank: int, rows: list[Timing]) -> None:
        """Steps of one share and micro-batch, just before or after others: the rank was as fast in both. If these
        took other seconds before, the pairs of that time are dropped, all but the one just before."""
        seen = self._seen.setdefault(rank, {})
        if rows[-1].work in seen and _has_moved(seen[rows[-1].work], rows[-FEW:]):
            last = next(reversed(seen))
            seen = self._seen[rank] = {} if last == rows[-1].work else {last: seen[last]}
        seen.pop(rows[-1].work, None)
        seen[rows[-1].work] = rows[-FEW:]
        if len(seen) > MOST_SEEN:
            del seen[next(iter(seen))]
        curve = fit([row for kept in seen.values() for row in kept])
        if curve is not None:
            self._fitted[rank] = curve
        else:
            self._fitted.pop(rank, None)

    def of(self, ranks: Iterable[int]) -> dict[int, StepModel]:
        """Return models of the ranks of which anything is known, if only their calibration."""
        wanted = {*ranks}
        timed = self.timed(wanted)
        untimed = sorted(self._calibrated.keys() & wanted - timed.keys())
        least = min((model.floor_seconds for model in timed.values()), default=0.0)
        floors = {rank: max(least, self._profiles[rank].optimizer_seconds or 0.0) for rank in untimed}
        return timed | {rank: StepModel(self._calibrated[rank], floors[rank]) for rank in untimed}

    def curve(self, rank: int) -> PassCurve | None:
        """Return the curve of a rank that is known at several micro-batches."""
        return self._calibrated.get(rank) or self._fitted.get(rank)

    def timed(self, ranks: Iterable[int]) -> dict[int, StepModel]:
        """Return models of the ranks that this run has timed; one timed by itself has the least floor of the others."""
        self._take_steps()
        wanted = {*ranks}
        timings = {rank: rows for rank, rows in self._timings.items() if rank in wanted}
        timed = models(timings, self._fitted | self._calibrated)
        least = min((model.floor_seconds for model in timed.values()), default=0.0)
        alone = self._measured.keys() & wanted - timed.keys()
        return timed | {rank: self._alone(rank, least) for rank in sorted(alone)}

    def _alone(self, rank: int, floor_seconds: float) -> StepModel:
        rate, micro = self._measured[rank]
        curve = self._calibrated.get(rank)
        if curve is None:
            return StepModel.linear(rate, floor_seconds)
        return StepModel(curve, floor_seconds, curve.samples_per_second(max(micro, 1)) / rate)


def _timing(report: Report) -> Timing:
    return Timing.of(report.own_samples, report.phases, 0 if report.replays else report.micro_batch)


def _has_moved(before: list[Timing], now: list[Timing]) -> bool:
    """Return whether a rank has another speed, by steps of the same share and micro-batch."""
    was = middle([row.busy for row in before])
    return abs(middle([row.busy for row in now]) - was) > MOVED * was


# ---------------------------------------------------------------- memory

PEAK_STEPS = 4
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
        self._steps: deque[Mapping[int, Report]] = deque(maxlen=PEAK_STEPS)  # of one plan version, not in _reported yet
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
        """Forget the peaks before the ranks copied their state."""
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
        self._profiles[rank], self._calibrated[rank] = profile, fit_memory(peaks)
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
            sizes[micro] = deque(maxlen=PEAK_STEPS)
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
        calibrated, model = self._calibrated.get(rank), fit_memory(peaks)
        if calibrated is not None:
            calibrated = calibrated._replace(base_bytes=calibrated.base_bytes + copied_bytes)
        if calibrated is None or not peaks:
            return model or calibrated
        is_steeper = model is not None and model.sample_bytes > calibrated.sample_bytes
        return model if is_steeper else calibrated.through(*max(peaks))
