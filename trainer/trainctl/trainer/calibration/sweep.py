"""The sweep of a calibration: passes of micro-batches 1, 2, 4 ... past the fastest one, then half-way to its
neighbours; whole steps of one effective batch, cut into micro-batches of each size that fits; and matrix products.

Passes and steps are the product's own, by one rank alone without a learning rate, so that the weights stay as they are.
"""

import contextlib
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from trainctl.protocol.calibration.peak import FALLS, between, has_fallen, next_micro
from trainctl.protocol.calibration.profile import GridPoint, MatmulRate, Pass
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
SWEEP_SECONDS: Final = 18.0
"""Time for the sweep of a calibration of 60 s: what would take longer isn't begun, but for the smallest micro-batch."""
HALVINGS: Final = 2
"""Times that sizes half-way between the fastest micro-batch and its neighbours are measured."""
CLOSE: Final = 0.25
"""Part of the best rate within which micro-batches are measured again, in turns, so that a disturbance of some seconds
doesn't decide between them."""
NEW_PASSES: Final = 3
"""Passes that a new size takes at least."""
ROUNDS: Final = 4
"""Times that close ones are measured again."""
GRID_SECONDS: Final = 6.0
"""Time for steps of all sizes of a calibration of 60 s; one that would take longer isn't begun, but the fastest is
always measured, by a step of fewer samples if need be."""
STEPS: Final = 3
"""Steps of each size, of which the median counts, if they are short."""
LONG_SECONDS: Final = 0.5
"""Time of a step above which it is measured once."""
DTYPES: Final = ("float32", "bfloat16", "float16")
SIZES: Final = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices."""
MATMUL_SECONDS: Final = 6.0
"""Time for products in all data types of a calibration of 60 s; a size that would take longer isn't measured."""
MATMUL_REPEATS: Final = 3
"""Times that a product is measured, of which the fastest counts."""
_GENERATION: Final = Generation(1, 1)


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
        passes = [self.time_again(self._measure(micro, self._pieces(micro, 1)[0]))]
        while len(passes) <= REPEATS and (len(passes) == 1 or time.perf_counter() - begun < MAX_SECONDS):
            passes.append(self.time_again(passes[-1]))
        return Pass(micro, passes[-1].seconds, max(timed.peak_bytes or 0 for timed in passes[1:]) or None)

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


class Sweep:
    """Passes and steps that were measured. A size that runs out of memory isn't tried again, nor a larger one."""

    def __init__(
        self, timer: StepRunner, changed: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`changed` is called after each measurement, with a line for people, which may be empty."""
        self._timer, self._changed, self._clock = timer, changed, clock
        self._passes: dict[int, Pass] = {}
        self._points: dict[int, GridPoint] = {}
        self._updates: list[float] = []
        self.out_of_memory_micro: int | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes by micro-batch, ascending."""
        return tuple(self._passes[micro] for micro in sorted(self._passes))

    @property
    def grid(self) -> tuple[GridPoint, ...]:
        """The steps by micro-batch, ascending."""
        return tuple(self._points[micro] for micro in sorted(self._points))

    @property
    def update_seconds(self) -> float | None:
        """Time of a step beside its passes; None: no step was measured."""
        return statistics.median(self._updates) if self._updates else None

    def measure_passes(self, most: int, seconds: float = SWEEP_SECONDS) -> None:
        """Measure passes of micro-batches up to `most`, in about so many seconds."""
        deadline = self._clock() + seconds
        self._double(most, deadline)
        self._repeat(self.passes, deadline)
        for _ in range(HALVINGS if self._passes else 0):
            for micro in between(self.passes, self.out_of_memory_micro):
                if self._is_in_time(micro, deadline):
                    self._measure(micro)
        for _ in range(ROUNDS if self._passes else 0):
            best = max(timed.rate for timed in self.passes)
            self._repeat([timed for timed in self.passes if timed.rate >= (1 - CLOSE) * best], deadline)

    def _double(self, most: int, deadline: float) -> None:
        """1, 2, 4 ... An end by falls is confirmed by another measurement of the sizes that decide it."""
        confirmed = 0
        while True:
            micro = next_micro(self.passes, most, self.out_of_memory_micro)
            if micro is not None and self._is_in_time(micro, deadline):
                self._measure(micro)
            elif self._passes and has_fallen(self.passes) and confirmed < len(self._passes):
                confirmed = len(self._passes)
                best = max(self.passes, key=lambda timed: timed.rate)
                self._repeat([best, *self.passes[-FALLS:]], deadline)
            else:
                return

    def _is_in_time(self, micro: int, deadline: float) -> bool:
        """Return whether a new size may fit and would be measured before the deadline, if it is as fast as the best."""
        if not self._passes or micro >= (self.out_of_memory_micro or math.inf):
            return not self._passes
        return self._clock() + NEW_PASSES * micro / max(timed.rate for timed in self.passes) < deadline

    def _measure(self, micro: int) -> None:
        try:
            self._take(self._timer.time_pass(micro))
        except DeviceMemoryError:
            self._lack_memory_for(micro)

    def _repeat(self, passes: Sequence[Pass], deadline: float) -> None:
        """Measure some sizes once more; the faster measurement counts."""
        for timed in passes:
            if timed.micro in self._passes and self._clock() <= deadline:
                try:
                    seconds = min(timed.seconds, self._timer.time_again(timed).seconds)
                except DeviceMemoryError:
                    self._lack_memory_for(timed.micro)
                else:
                    self._take(msgspec.structs.replace(timed, seconds=seconds))

    def _take(self, measured: Pass) -> None:
        self._passes[measured.micro] = measured
        self._changed(f"micro-batch {measured.micro}: {measured.rate:.4g} samples/s")

    def _lack_memory_for(self, micro: int) -> None:
        """Forget this micro-batch and larger ones, whatever was measured before."""
        self.out_of_memory_micro = min(micro, self.out_of_memory_micro or micro)
        self._passes = {size: timed for size, timed in self._passes.items() if size < micro}
        self._points = {size: point for size, point in self._points.items() if size < micro}
        self._changed(f"micro-batch {micro}: out of memory")

    def measure_steps(self, effective: int, seconds: float = GRID_SECONDS) -> None:
        """Measure steps of each micro-batch of at most `effective` samples, the fastest first."""
        deadline = self._clock() + seconds
        for timed in sorted(self.passes, key=lambda timed: -timed.rate):
            left = deadline - self._clock()
            is_in_time = effective / timed.rate < left
            if timed.micro not in self._passes or timed.micro > effective or not (is_in_time or not self._points):
                continue
            if not is_in_time:
                effective = timed.micro * max(1, int(left * timed.rate / timed.micro))
            try:
                steps = [self._timer.step(timed.micro, effective)]
                if steps[0].seconds < LONG_SECONDS:
                    steps += [self._timer.step(timed.micro, effective) for _ in range(STEPS - 1)]
            except DeviceMemoryError:
                self._lack_memory_for(timed.micro)
                continue
            median = statistics.median(step.seconds for step in steps)
            self._points[timed.micro] = GridPoint(timed.micro, math.ceil(effective / timed.micro), median)
            self._updates += [step.optimizer_seconds for step in steps]
            self._passes[timed.micro] = _fastest(timed, effective, steps)
            self._changed("")


def _fastest(timed: Pass, effective: int, steps: Sequence[StepTime]) -> Pass:
    """Return a pass with the mean seconds of one in the fastest step, if that was faster: otherwise what disturbed its
    measurement would make steps look faster than their passes."""
    count, rest = divmod(effective, timed.micro)
    if rest:
        return timed
    fastest = min(step.seconds - step.optimizer_seconds for step in steps) / count
    return timed if fastest >= timed.seconds else msgspec.structs.replace(timed, seconds=max(fastest, 1e-9))


# ------------------------------------------------------------ products


def matmul_rates(backend: Backend, seconds: float = MATMUL_SECONDS) -> Iterator[MatmulRate]:
    """Yield the best rate of one data type after another, of larger and larger matrices; `seconds`: for all of them."""
    for dtype in DTYPES:
        best, deadline = 0.0, time.monotonic() + seconds / len(DTYPES)
        for size in SIZES:
            took = _product_seconds(backend, dtype, size)
            best = max(best, 2 * size**3 / took / 1e9) if took is not None else best
            # The next size has eight times the work.
            if took is None or time.monotonic() + 8 * took * (MATMUL_REPEATS + 2) > deadline:
                break
        if best:
            yield MatmulRate(dtype, best)


def _product_seconds(backend: Backend, dtype: str, size: int) -> float | None:
    """Return the seconds of a product after one that warms up, None if memory is too short."""
    times = list[float]()
    try:
        work = _product(backend, dtype, size)
        for _ in range(1 + MATMUL_REPEATS):
            begun = time.perf_counter()
            work()
            backend.device.wait()
            times.append(max(time.perf_counter() - begun, 1e-7))
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
        return None
    return min(times[1:])


def _product(backend: Backend, dtype: str, size: int) -> Callable[[], object]:
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
