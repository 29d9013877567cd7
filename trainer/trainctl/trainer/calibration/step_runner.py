"""One rank alone that runs the product's own steps; without a learning rate, the weights stay as they are."""

import contextlib
import ctypes
import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from trainctl.protocol.calibration.profile import Pass
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import Form, Generation, PlanKind, Range, RankWork, Report, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.calibration.sweep import StepTime
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.growing_dataset import TrainingData
from trainctl.trainer.data.permutation import Indices, ranges_of
from trainctl.trainer.loop import train
from trainctl.trainer.reference import wants_reference
from trainctl.trainer.step import side_plans
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank, Settings

REPEATS: Final = 2
"""Measurements of a size after the first, of which the fastest counts: other work on the machine only slows passes."""
ENOUGH_SECONDS: Final = 0.15
"""Time that one measurement should take, over several passes: longer than what the memory reading may lag."""
MAX_PIECES: Final = 32
"""Micro-batches in one measurement."""
MAX_SECONDS: Final = 3.0
"""Time for one micro-batch after which it isn't repeated."""
_GENERATION: Final = Generation(1, 1)


class StepRunner:
    """Times passes and steps. Raises DeviceMemoryError where a micro-batch doesn't fit, and what a step raises."""

    def __init__(
        self,
        config: RunFile,
        node: str,
        backend: Backend,
        data: TrainingData,
        folder: Path,
        trying: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`folder` is for temporary files. `trying` receives each micro-batch before it is run."""
        self._backend, self._data, self._seed, self._trying = backend, data, config.run.seed, trying
        self._fastest: dict[int, list[tuple[Indices, float]]] = {}  # of each size: micro-batches and their times
        self._progress = Progress()
        self._progress.load(0, 0)
        self._progress.form(Form(run="calibration", generation=_GENERATION, engine="none", ranks=(0,)))
        self._status = StatusWriter(folder / "status", os.getpid())
        rank_data = cast(TrainingData, _WithReference(data)) if wants_reference(config) else data
        self._rank = Rank(
            Identity("calibration", node, 0),
            Settings.of(config, node),
            backend,
            rank_data,
            self._progress,
            self._status,
            lambda _: None,
        )

    def close(self) -> None:
        """End its threads."""
        self._rank.close()
        self._status.close()

    def time_pass(self, micro: int) -> Pass:
        """Return forward and backward of one micro-batch, after a pass that warms up. Memory is returned to the system
        before, so that the peak is this size's own."""
        self.give_back_memory()
        begun = time.perf_counter()
        timed = self.time_again(self._measure(micro, self._pieces(micro, 1)[0]))
        peaks = list[int]()
        while len(peaks) < REPEATS and (not peaks or time.perf_counter() - begun < MAX_SECONDS):
            timed = self.time_again(timed)
            peaks.append(timed.peak_bytes or 0)
        return Pass(micro, timed.seconds, max(peaks) or None)

    def time_again(self, timed: Pass) -> Pass:
        """Return one more measurement of a size whose time is roughly clear: the mean over several micro-batches, of
        each the fastest time so far."""
        if timed.micro not in self._fastest:
            count = max(1, min(MAX_PIECES, math.ceil(ENOUGH_SECONDS / timed.seconds)))
            self._fastest[timed.micro] = [(piece, math.inf) for piece in self._pieces(timed.micro, count)]
        times, peak = list[tuple[Indices, float]](), 0
        for piece, seconds in self._fastest[timed.micro]:
            measured = self._measure(timed.micro, piece)
            times.append((piece, min(seconds, measured.seconds)))
            peak = max(peak, measured.peak_bytes or 0)
        self._fastest[timed.micro] = times
        return Pass(timed.micro, statistics.fmean(seconds for _, seconds in times), peak or None)

    def time_forward(self, micro: int) -> Pass:
        """Return a forward pass alone, as scoring runs it: the median of several, after one that warms up."""
        self._backend.discard()
        batch = self._data.batch(self._data.samples_at(self._pieces(micro, 1)[0], self._seed))
        times, begun = list[float](), time.perf_counter()
        while len(times) < 1 + REPEATS or time.perf_counter() - begun < ENOUGH_SECONDS:
            started = time.perf_counter()
            self._backend.token_log_probabilities(batch)
            times.append(time.perf_counter() - started)
            if time.perf_counter() - begun > MAX_SECONDS:
                break
        seconds = max(statistics.median(times[1:] or times), 1e-9)
        return Pass(micro, seconds, self._backend.memory().peak_bytes or None)

    def step(self, micro: int, samples: int) -> StepTime:
        """Do a training step of the first so many samples."""
        plan = self._plan("train", micro, (Range(0, samples),))
        report = self._report(micro, lambda: train(self._rank, plan, time.perf_counter()))
        return StepTime(report.step_seconds, max(report.step_seconds - report.phases.busy, 1e-9))

    def give_back_memory(self) -> None:
        """Return what the backend, and the C library (glibc), keep of freed memory to the system."""
        self._backend.discard()
        with contextlib.suppress(AttributeError, OSError):
            ctypes.CDLL(None).malloc_trim(0)

    def _pieces(self, micro: int, count: int) -> list[Indices]:
        """The first micro-batches of the data, with samples of like length together as during training."""
        positions = np.arange(micro * count, dtype=np.int64)
        order = np.argsort(-self._data.targets(self._data.samples_at(positions, self._seed)), kind="stable")
        return [*positions[order].reshape(count, micro)]

    def _measure(self, micro: int, positions: Indices) -> Pass:
        plan = self._plan("measure", micro, ranges_of(positions))
        report = self._report(micro, lambda: side_plans.measure(self._rank, plan, time.perf_counter()))
        seconds = report.phases.forward + report.phases.backward
        return Pass(micro, max(seconds, 1e-9), self._backend.memory().peak_bytes)

    def _plan(self, kind: PlanKind, micro: int, ranges: tuple[Range, ...]) -> StepPlan:
        step, samples = self._progress.last_step + 1, sum(part.count for part in ranges)
        return StepPlan(
            run="calibration",
            generation=_GENERATION,
            seq=step,
            kind=kind,
            step=step,
            plan_version=step,
            cursor=0,
            global_batch=samples,
            work=(RankWork(0, ranges, micro),),
            learning_rate=0.0,
            divisor=max(1.0, samples * self._data.mean_weight),
        )

    def _report(self, micro: int, run: Callable[[], Report]) -> Report:
        """A step continues with half a micro-batch that doesn't fit, and fails where a single sample doesn't."""
        self._trying(micro)
        try:
            report = run()
        except TrainctlError as error:
            if "out of memory" not in str(error):
                raise
            raise DeviceMemoryError(str(error)) from None
        if report.replays:
            raise DeviceMemoryError(f"out of memory with a micro-batch of {micro}")
        return report


class _WithReference:
    """Data whose reference log-probabilities are zeros: they cost as much time and memory as the real ones, which may
    take hours to compute."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def batch(self, indices: Indices) -> Batch:
        batch = self._data.batch(indices)
        return dataclasses.replace(batch, reference=np.zeros(batch.inputs.shape, np.float32))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)
