"""Measurements of each plan beside its result: phases, memory, rates and the size of updates."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.messages import PHASES, Phases, Report, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.base import Array, Backend, CompileMeter, Memory
from trainctl.trainer.collective.group import Reduced, Tail
from trainctl.trainer.objectives.objective import Objective
from trainctl.trainer.step.micro_batches import PlanSums

Ranges = Callable[[str], AbstractContextManager[object]]
"""Makes a range of a phase in a profile."""
_in_order = itemgetter(*PHASES)
TREND_STEPS: Final = 10
"""Steps over which the mean and the slope of memory are taken."""
_MIDDLE: Final = (TREND_STEPS - 1) / 2
_SPREAD: Final = sum((step - _MIDDLE) ** 2 for step in range(TREND_STEPS))
_NOTHING: Mapping[str, float] = MappingProxyType({})


class Observer:
    """Measures a rank's plans, and writes their reports. A new metric of a rank is taken here."""

    def __init__(self, run: str, rank: int, backend: Backend, status: StatusWriter, update_ratio_every: int) -> None:
        """`update_ratio_every`: steps between two measurements of the update ratio, each of which copies the trained
        weights twice, in float32, to main memory; 0: never."""
        self._run, self._rank, self._backend, self._status = run, rank, backend, status
        self._update_ratio_every, self._update_ratio = update_ratio_every, dict[str, float]()
        self._memory_trend = MemoryTrend()
        self.flops: StepFlops | None = None  # of the model, if its sizes are known
        self.ranges: Ranges | None = None  # of the phases, while steps are profiled

    def begin(self, started: float) -> "Stopwatch":
        """Return the stopwatch of a plan: time and memory are this plan's from here on."""
        self._backend.reset_peak()
        return Stopwatch(self._status, started, self._backend.compile_meter, self.ranges)

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Measure, around the update of a step, how large it is relative to the trained weights."""
        if not self._update_ratio_every or step % self._update_ratio_every:
            yield
            return
        before = self._backend.copy_of("weights")
        yield
        after = self._backend.copy_of("weights")
        if size := _norm(before):
            self._update_ratio = {"update_ratio": _norm({name: after[name] - before[name] for name in before}) / size}

    def report(
        self, plan: StepPlan, watch: "Stopwatch", sums: PlanSums | None = None, own_weight: float = 0.0,
        values: Mapping[str, float] = _NOTHING, *, grad_norm: float = 0.0, skipped: str | None = None,
    ) -> Report:  # fmt: skip
        """Return a plan's report with everything that was measured of it."""
        memory, seconds, sums = self._backend.memory(), watch.seconds(), sums or PlanSums()
        measured = {**values, **memory.values, **self._backend.memory_parts(memory)}
        if plan.kind == "train":
            measured |= {**self._memory_trend.add(memory), **self._update_ratio}
            self._update_ratio = {}
        measured |= self._flop_rates(plan, sums, seconds)
        if compiled := watch.compile_seconds():
            measured["compile_seconds"] = compiled
        return Report(
            run=self._run, rank=self._rank, generation=plan.generation, seq=plan.seq, kind=plan.kind, step=plan.step,
            loss_sum=sums.loss_sum, weight=sums.weight, own_weight=own_weight, own_samples=sums.samples,
            tokens=sums.tokens, own_tokens=sums.own_tokens, grad_norm=grad_norm, skipped=skipped,
            micro_batch=sums.micro_batch, replays=sums.replays, phases=watch.phases(), step_seconds=seconds,
            finished_at=time.time(), values=measured,
        )  # fmt: skip

    def _flop_rates(self, plan: StepPlan, sums: PlanSums, seconds: float) -> Mapping[str, float]:
        """The rank's and the run's rates in 10^12 operations per second; nothing of a plan that trains on no token."""
        if self.flops is None or not sums.tokens or seconds <= 0:
            return _NOTHING
        unit, each = seconds * 1e12, self._backend.parts.objective.row.sequences
        return {
            "tflops": self.flops.of(sums.own_tokens, sums.samples * each) / unit,
            "run_tflops": self.flops.of(sums.tokens, plan.global_batch * each) / unit,
        }


class Stopwatch:
    """One plan's phases, in seconds by the monotonic clock; it starts when the wait for the plan began."""

    def __init__(
        self, status: StatusWriter, started: float, meter: CompileMeter | None = None, ranges: Ranges | None = None
    ) -> None:
        """`meter`: a compiler's, whose time counts in no phase. `ranges`: those of a step that is profiled."""
        self._status, self._ranges = status, ranges
        self._meter = meter or CompileMeter()
        self._compiled_before = self._meter.seconds
        self._started = started
        waited = time.perf_counter() - started
        self._marks: list[tuple[str, Any, Any]] = []
        self._spent = {**dict.fromkeys(PHASES, 0.0), "wait": waited}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is done within; an abandoned phase counts too."""
        timed = Phase(self._status, self._spent, name, self._meter)
        return timed if self._ranges is None else _both(timed, self._ranges(name))

    def on_device(self, name: str, backend: Backend) -> AbstractContextManager[None]:
        """Time what is done within, as `phase` does. Where the device works on after a call has returned, its own time
        counts, once `settle` is called."""
        begun = backend.mark()
        return self.phase(name) if begun is None else self._between_marks(name, backend, begun)

    @contextmanager
    def _between_marks(self, name: str, backend: Backend, begun: Any) -> Iterator[None]:
        self._status.show(name)
        compiled = self._meter.seconds
        if self._ranges is None:
            yield
        else:
            with self._ranges(name):
                yield
        self._spent[name] -= self._meter.seconds - compiled
        self._marks.append((name, begun, backend.mark()))

    def settle(self, backend: Backend) -> None:
        """Add the time of phases on the device, which has passed their end."""
        for name, begun, ended in self._marks:
            self._spent[name] += backend.seconds_between(begun, ended)
        for name in {name for name, _, _ in self._marks}:
            self._spent[name] = max(0.0, self._spent[name])  # the compiler may have begun before its pass on the device
        self._marks.clear()

    def phases(self) -> Phases:
        return Phases(*_in_order(self._spent))

    def compile_seconds(self) -> float:
        """Return the seconds that the compiler has taken in this plan."""
        return self._meter.seconds - self._compiled_before

    def seconds(self) -> float:
        """Since the wait for the plan began, without the compiler's."""
        return time.perf_counter() - self._started - self.compile_seconds()


@contextmanager
def _both(timed: "Phase", profiled: AbstractContextManager[object]) -> Iterator[None]:
    with timed, profiled:
        yield


class Phase:
    """A context manager written out, since a generator's would cost the loop twice as much."""

    __slots__ = ("_begun", "_meter", "_name", "_spent", "_status")

    def __init__(self, status: StatusWriter, spent: dict[str, float], name: str, meter: CompileMeter) -> None:
        self._status, self._spent, self._name, self._meter = status, spent, name, meter
        self._begun = 0.0

    def __enter__(self) -> None:
        self._status.show(self._name)
        self._begun = time.perf_counter() - self._meter.seconds

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._meter.seconds - self._begun
        self._spent[self._name] = self._spent.get(self._name, 0.0) + seconds


class MemoryTrend:
    """Remembers the last peaks, with their sum and that of each times its place: a step costs the loop little."""

    def __init__(self) -> None:
        self._peaks: deque[int] = deque()
        self._sum = self._by_place = 0

    def add(self, memory: Memory) -> dict[str, float]:
        """Take one more step's peak, and return the mean peak over the cap, and the least-squares slope of the peaks in
        bytes a step; the latter not before TREND_STEPS are known. Nothing where no peak can be read."""
        peak, peaks = memory.peak_bytes, self._peaks
        if peak is None:
            return {}
        if len(peaks) == TREND_STEPS:
            self._sum -= peaks.popleft()
            self._by_place -= self._sum  # all others are one place nearer to the first
        self._by_place += len(peaks) * peak
        self._sum += peak
        peaks.append(peak)
        found = {"memory_use": self._sum / len(peaks) / memory.cap_bytes} if memory.cap_bytes else {}
        if len(peaks) == TREND_STEPS:
            found["memory_growth"] = (self._by_place - _MIDDLE * self._sum) / _SPREAD
        return found


def _norm(arrays: Mapping[str, Array]) -> float:
    """The global norm, summed in float64."""
    return float(np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays.values())))


def step_values(objective: Objective, own: Tail, tail: Tail, reduced: Reduced | None) -> dict[str, float]:
    """Return a step's metrics by name: the mean loss over the rank's own samples in nats per unit of weight, the
    objective's over all ranks, and bytes and rate of the sum. What has no weight, or wasn't summed, is left out."""
    values = {"own_loss": own.loss_sum / own.weight} if own.weight > 0 else {}
    for row in objective.row.metrics:
        if tail.weights[row.weight]:
            values[row.name] = tail.metrics[row.name] / tail.weights[row.weight]
    if reduced is not None:
        values["sum_bytes"] = float(reduced.bytes)
        if reduced.seconds > 0:
            values["sum_bytes_per_second"] = reduced.bytes / reduced.seconds
    return values
