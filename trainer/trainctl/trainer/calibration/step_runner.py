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
from typing import Any, Final, NamedTuple, cast

import numpy as np

from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import Pass
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.permutation import Indices, ranges_of
from trainctl.trainer.data.training_data import TrainingData
from trainctl.trainer.loop import train
from trainctl.trainer.references.preparation import wants_reference
from trainctl.trainer.step import side_plans
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank, Settings

REPEATS: Final = 2
"""Measurements of a size after the first, of which the fastest counts: other work on the machine only slows passes."""
ENOUGH_SECONDS: Final = 0.15
"""Time that one measurement should take, over several passes: longer than what the memory reading may lag."""
MOST_PIECES: Final = 32
"""Micro-batches in one measurement."""
MOST_SECONDS: Final = 3.0
"""Time for one micro-batch after which it isn't repeated."""
_GENERATION: Final = m.Generation(1, 1)


class StepTime(NamedTuple):
    """A whole step."""

    seconds: float  # all of it
    optimizer_seconds: float  # the update, and what else isn't part of a pass: norms, cleared sums, the report


class StepRunner:
    """Raises DeviceMemoryError where a micro-batch doesn't fit, and what a step raises."""

    def __init__(
        self, config: RunFile, node: str, backend: Backend, data: TrainingData, folder: Path,
        learning_rate: float = 0.0,
    ) -> None:  # fmt: skip
        """`folder` is for temporary files."""
        self._backend, self._data, self._seed, self._learning_rate = backend, data, config.run.seed, learning_rate
        self._fastest: dict[int, list[tuple[Indices, float]]] = {}  # of each size: micro-batches and their times
        self._progress = Progress()
        self._progress.load(0, 0)
        self._progress.form(m.Form(run="calibration", generation=_GENERATION, engine="none", ranks=(0,)))
        self._status = StatusWriter(folder / "status", os.getpid())
        given = cast(TrainingData, _WithReference(data)) if wants_reference(config) else data
        self._rank = Rank(
            Identity("calibration", node, 0), Settings.of(config, node), backend, given, self._progress, self._status,
            lambda _: None,
        )  # fmt: skip

    def close(self) -> None:
        """End its threads."""
        self._rank.close()
        self._status.close()

    def settle(self) -> None:
        """One small step, after which gradients and optimizer hold the memory that they hold during training."""
        self.step(1, 2)

    def time_pass(self, micro: int) -> Pass:
        """Forward and backward of one micro-batch, after a pass that warms up. Memory is returned to the system
        before, so that the peak is this size's own."""
        self._backend.discard()
        give_back_memory()
        begun = time.perf_counter()
        first = self._measure(micro, self._pieces(micro, 1)[0])
        known = self.time_again(first)
        peaks = list[int]()
        while len(peaks) < REPEATS and (not peaks or time.perf_counter() - begun < MOST_SECONDS):
            known = self.time_again(known)
            peaks.append(known.peak_bytes or 0)
        return Pass(micro, known.seconds, max(peaks) or None)

    def time_again(self, known: Pass) -> Pass:
        """One more measurement of a size whose time is known roughly: the mean over several micro-batches, of each the
        fastest time so far."""
        if known.micro not in self._fastest:
            count = max(1, min(MOST_PIECES, math.ceil(ENOUGH_SECONDS / known.seconds)))
            self._fastest[known.micro] = [(piece, math.inf) for piece in self._pieces(known.micro, count)]
        found, peak = list[tuple[Indices, float]](), 0
        for piece, seconds in self._fastest[known.micro]:
            one = self._measure(known.micro, piece)
            found.append((piece, min(seconds, one.seconds)))
            peak = max(peak, one.peak_bytes or 0)
        self._fastest[known.micro] = found
        return Pass(known.micro, statistics.fmean(seconds for _, seconds in found), peak or None)

    def time_forward(self, micro: int) -> Pass:
        """A forward pass alone, as scoring runs it: the median of several, after one that warms up."""
        self._backend.discard()
        batch = self._data.batch(self._data.samples_at(self._pieces(micro, 1)[0], self._seed))
        seconds, begun = list[float](), time.perf_counter()
        while len(seconds) < 1 + REPEATS or time.perf_counter() - begun < ENOUGH_SECONDS:
            started = time.perf_counter()
            self._backend.token_log_probabilities(batch)
            seconds.append(time.perf_counter() - started)
            if time.perf_counter() - begun > MOST_SECONDS:
                break
        return Pass(
            micro, max(statistics.median(seconds[1:] or seconds), 1e-9), self._backend.memory().peak_bytes or None
        )

    def step(self, micro: int, samples: int) -> StepTime:
        """A training step of so many samples."""
        report = self.train(micro, samples)
        return StepTime(report.step_seconds, max(report.step_seconds - report.phases.busy, 1e-9))

    def train(self, micro: int, samples: int) -> m.Report:
        """The report of a training step of the first so many samples."""
        plan = self._plan("train", micro, (m.Range(0, samples),))
        return self._report(micro, lambda: train(self._rank, plan, time.perf_counter()))

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

    def _plan(self, kind: m.PlanKind, micro: int, ranges: tuple[m.Range, ...]) -> m.StepPlan:
        step, samples = self._progress.last_step + 1, sum(one.count for one in ranges)
        return m.StepPlan(
            run="calibration", generation=_GENERATION, seq=step, kind=kind, step=step, plan_version=step, cursor=0,
            global_batch=samples, work=(m.RankWork(0, ranges, micro),),
            learning_rate=self._learning_rate,
            divisor=max(1.0, samples * self._data.mean_weight),
        )  # fmt: skip

    def _report(self, micro: int, run: Callable[[], m.Report]) -> m.Report:
        """A step continues with half a micro-batch that doesn't fit, and fails where a single sample doesn't."""
        try:
            report = run()
        except TrainctlError as error:
            if "out of memory" not in str(error):
                raise
            raise DeviceMemoryError(str(error)) from None
        if report.replays:
            raise DeviceMemoryError(f"out of memory with a micro-batch of {micro}")
        return report


def give_back_memory() -> None:
    """Return what the C library keeps of freed memory to the system, where it can (glibc)."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class _WithReference:
    """Data whose reference log-probabilities are zeros: they cost as much time and memory as the real ones, which may
    take hours to compute."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def batch(self, indices: Indices) -> Batch:
        made = self._data.batch(indices)
        return dataclasses.replace(made, reference=np.zeros(made.inputs.shape, np.float32))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)
