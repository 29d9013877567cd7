"""Measurements of a device: passes and steps of the product's own, by one rank alone without a learning rate, so that
the weights stay as they are; and the best rate of matrix products by data type.
"""

import contextlib
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from trainctl.protocol.calibration.profile import MatmulRate, Pass
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import Form, Generation, PlanKind, Range, RankWork, Report, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices, ranges_of
from trainctl.trainer.loop import train
from trainctl.trainer.reference import wants_reference
from trainctl.trainer.step import side_plans
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

REPEATS: Final = 2
"""Measurements of a size after the first, of which the fastest counts: other work on the machine only slows passes."""
ENOUGH_SECONDS: Final = 0.15
"""Time that one measurement should take, over several passes: longer than what the memory reading may lag."""
MAX_PIECES: Final = 32
"""Micro-batches in one measurement."""
MAX_SECONDS: Final = 3.0
"""Time for one micro-batch after which it isn't repeated."""
_GENERATION: Final = Generation(1, 1)
DTYPES: Final = ("float32", "bfloat16", "float16")
SIZES: Final = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices."""
MATMUL_SECONDS: Final = 6.0
"""Time for products in all data types of a calibration of 60 s; a size that would take longer isn't measured."""
MATMUL_REPEATS: Final = 3
"""Times that work is measured, of which the fastest counts."""
Work = Callable[[], object]


@dataclass(frozen=True)
class StepTime:
    """A whole step."""

    seconds: float
    optimizer_seconds: float  # the update, and what else isn't part of a pass: norms, cleared sums, the report


class StepRunner:
    """Times passes and steps. Raises DeviceMemoryError where a micro-batch doesn't fit, and what a step raises."""

    def __init__(
        self,
        config: RunFile,
        node: str,
        backend: Backend,
        data: Dataset,
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
        if wants_reference(config):  # zeros cost as much time as the real values, which may take hours to compute
            data.attach_reference(np.broadcast_to(np.float32(0), (data.counted,)))
        self._rank = Rank(
            Identity("calibration", node, 0),
            config,
            backend,
            data,
            self._progress,
            self._status,
            send=lambda _: None,
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
        self._backend.device.free_cache()
        batch = self._data.batch(self._data.samples_at(self._pieces(micro, 1)[0], self._seed))
        times, begun = list[float](), time.perf_counter()
        while len(times) < 1 + REPEATS or time.perf_counter() - begun < ENOUGH_SECONDS:
            started = time.perf_counter()
            self._backend.token_log_probabilities(batch)
            times.append(time.perf_counter() - started)
            if time.perf_counter() - begun > MAX_SECONDS:
                break
        seconds = max(statistics.median(times[1:] or times), 1e-9)
        return Pass(micro, seconds, self._backend.device.memory.read().peak_bytes or None)

    def step(self, micro: int, samples: int) -> StepTime:
        """Do a training step of the first so many samples."""
        plan = self._plan("train", micro, (Range(0, samples),))
        report = self._report(micro, lambda: train(self._rank, plan, time.perf_counter()))
        return StepTime(report.step_seconds, max(report.step_seconds - report.phases.busy, 1e-9))

    def give_back_memory(self) -> None:
        """Return what the backend, and the C library (glibc), keep of freed memory to the system."""
        self._backend.device.free_cache()
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
        return Pass(micro, max(seconds, 1e-9), self._backend.device.memory.read().peak_bytes)

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


# ------------------------------------------------------------ products


def matmul_rates(backend: Backend, seconds: float = MATMUL_SECONDS) -> Iterator[MatmulRate]:
    """Yield the rate of one data type after another; `seconds`: for all of them."""
    for dtype in DTYPES:
        if gflops := _best_gflops(backend, dtype, seconds / len(DTYPES)):
            yield MatmulRate(dtype, gflops)


def _best_gflops(backend: Backend, dtype: str, most_seconds: float) -> float:
    best, deadline = 0.0, time.monotonic() + most_seconds
    for size in SIZES:
        seconds = _fastest_seconds(backend, dtype, size)
        if seconds is None:
            break
        best = max(best, 2 * size**3 / seconds / 1e9)
        if time.monotonic() + 8 * seconds * (MATMUL_REPEATS + 2) > deadline:  # the next size has eight times the work
            break
    return best


def _fastest_seconds(backend: Backend, dtype: str, size: int) -> float | None:
    """Return the seconds of a product after one that warms up, None if memory is too short."""
    try:
        work = _product(backend, dtype, size)
        return min([_seconds(backend, work) for _ in range(1 + MATMUL_REPEATS)][1:])
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
        return None


def _seconds(backend: Backend, work: Work) -> float:
    begun = time.perf_counter()
    work()
    backend.device.wait()
    return max(time.perf_counter() - begun, 1e-7)


def _product(backend: Backend, dtype: str, size: int) -> Work:
    """Return a product of two square matrices, with torch of random values: constant ones need less power, and a GPU
    would then be up to 13 % faster."""
    if backend.name == "mlx":
        import mlx.core as mx

        ones = [mx.ones((size, size), getattr(mx, dtype)) for _ in range(2)]
        mx.eval(ones)
        return lambda: mx.eval(ones[0] @ ones[1])
    import torch

    left = torch.randn(size, size, dtype=getattr(torch, dtype), device=backend.device.name.split()[0])
    right, out = left.flip(0), torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)
