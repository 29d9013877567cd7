"""Measurements of each plan beside its result: phases, memory, rates and the size of updates."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.messages import PHASES, Phases, Report, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import Backend, CompileMeter, Device
from trainctl.trainer.backends.memory import Memory
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.collective.group import Reduced, Tail
from trainctl.trainer.objectives.objective import Objective
from trainctl.trainer.step.micro_batches import MicroBatchQueue

Ranges = Callable[[str], AbstractContextManager[object]]
"""Makes a range of a phase in a profile."""
_in_order = itemgetter(*PHASES)
TREND_STEPS: Final = 10
"""Steps over which the mean and the slope of memory are taken."""
_MIDDLE: Final = (TREND_STEPS - 1) / 2
_SPREAD: Final = sum((step - _MIDDLE) ** 2 for step in range(TREND_STEPS))
_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Update:
    """The outcome of a step's update."""

    norm: float  # of the mean gradient, before clipping
    clip: float = 1.0  # what clipping multiplied it by
    skipped: str | None = None  # why parameters stay as they are


class Observer:
    """Measures a rank's plans, and writes their reports. A new metric of a rank is taken here."""

    def __init__(self, run: str, rank: int, backend: Backend, status: StatusWriter, update_ratio_every: int) -> None:
        """`update_ratio_every`: steps between two measurements of the update ratio, each of which copies the trained
        weights twice, in float32, to main memory; 0: never."""
        self._run, self._rank, self._backend, self._status = run, rank, backend, status
        self._objective = backend.recipe.objective
        self._update_ratio_every, self._update_ratio = update_ratio_every, dict[str, float]()
        self._memory_trend = MemoryTrend()
        self.flops: StepFlops | None = None  # of the model, if its sizes are known
        self.ranges: Ranges | None = None  # of the phases, while steps are profiled

    def begin(self, started: float) -> "Stopwatch":
        """Return the stopwatch of a plan: time and memory are this plan's from here on."""
        self._backend.device.memory.reset()
        return Stopwatch(self._status, started, self._backend.compile_meter, self.ranges)

    @contextmanager
    def update(self, step: int) -> Iterator[None]:
        """Measure, around the update of a step, how large it is relative to the trained weights."""
        if not self._update_ratio_every or step % self._update_ratio_every:
            yield
            return
        before = self._backend.copy_out("weights")
        yield
        after = self._backend.copy_out("weights")
        if size := _norm(before):
            self._update_ratio = {"update_ratio": _norm({name: after[name] - before[name] for name in before}) / size}

    def step_report(
        self,
        plan: StepPlan,
        watch: "Stopwatch",
        queue: MicroBatchQueue,
        update: Update,
        *,
        own: Tail,
        own_samples: int,
        total: Tail,
        reduced: Reduced | None,
    ) -> Report:
        """Return the report of a step: of the rank's own part, and of all ranks' in `total`."""
        return self.report(
            plan,
            watch,
            queue,
            loss_sum=total.loss_sum,
            weight=total.weight,
            own_weight=own.weight,
            own_samples=own_samples,
            tokens=total.tokens,
            own_tokens=own.tokens,
            grad_norm=update.norm,
            skipped=update.skipped,
            values={"clip_scale": update.clip, **_step_values(self._objective, own, total, reduced)},
        )

    def report(
        self,
        plan: StepPlan,
        watch: "Stopwatch",
        queue: MicroBatchQueue | None = None,
        *,
        loss_sum: float = 0.0,
        weight: float = 0.0,
        own_weight: float = 0.0,
        own_samples: int = 0,
        tokens: int = 0,
        own_tokens: int = 0,
        grad_norm: float = 0.0,
        skipped: str | None = None,
        values: Mapping[str, float] = _NOTHING,
    ) -> Report:
        """Return a plan's report with everything that was measured of it. `queue`: its micro-batches."""
        memory, seconds = self._backend.device.memory.read(), watch.seconds()
        measured = {**values, **memory.values, **self._backend.memory_by_part.values(memory)}
        if plan.kind == "train":
            measured |= {**self._memory_trend.add(memory), **self._update_ratio}
            self._update_ratio = {}
        if self.flops is not None and tokens and seconds > 0:  # a plan that trains on no token has no rate
            unit, each = seconds * 1e12, self._objective.spec.sequences
            measured["tflops"] = self.flops.of(own_tokens, own_samples * each) / unit
            measured["run_tflops"] = self.flops.of(tokens, plan.global_batch * each) / unit
        if compiled := watch.compile_seconds():
            measured["compile_seconds"] = compiled
        return Report(
            run=self._run,
            rank=self._rank,
            generation=plan.generation,
            seq=plan.seq,
            kind=plan.kind,
            step=plan.step,
            loss_sum=loss_sum,
            weight=weight,
            own_weight=own_weight,
            own_samples=own_samples,
            tokens=tokens,
            own_tokens=own_tokens,
            grad_norm=grad_norm,
            skipped=skipped,
            micro_batch=0 if queue is None else queue.micro_batch,
            replays=0 if queue is None else queue.replays,
            phases=watch.phases(),
            step_seconds=seconds,
            finished_at=time.time(),
            values=measured,
        )


def _step_values(objective: Objective, own: Tail, total: Tail, reduced: Reduced | None) -> dict[str, float]:
    """Return a step's metrics by name: the mean loss over the rank's own samples in nats per unit of weight, the
    objective's over all ranks, and bytes and rate of the sum. What has no weight, or wasn't summed, is left out."""
    values = {"own_loss": own.loss_sum / own.weight} if own.weight > 0 else {}
    for metric in objective.spec.metrics:
        if total.weights[metric.weight]:
            values[metric.name] = total.metrics[metric.name] / total.weights[metric.weight]
    if reduced is not None:
        values["sum_bytes"] = float(reduced.bytes)
        if reduced.seconds > 0:
            values["sum_bytes_per_second"] = reduced.bytes / reduced.seconds
    return values


class Stopwatch:
    """One plan's phases, in seconds by the monotonic clock; it starts when the wait for the plan began."""

    def __init__(
        self, status: StatusWriter, started: float, meter: CompileMeter | None = None, ranges: Ranges | None = None
    ) -> None:
        """`meter`: a compiler's, whose time counts in no phase. `ranges`: those of a step that is profiled."""
        self.status, self.ranges, self.meter = status, ranges, meter or CompileMeter()
        self.spent = {**dict.fromkeys(PHASES, 0.0), "wait": time.perf_counter() - started}
        self.marks: list[tuple[str, Any, Any]] = []  # phases on the device, with where they begin and end in its queue
        self._started, self._compiled_before = started, self.meter.seconds

    @contextmanager
    def phase(self, name: str, device: Device | None = None) -> Iterator[None]:
        """Time what is done within; on the host an abandoned phase counts too. Of a `device` that works on after a call
        has returned, its own time counts, once `settle` is called."""
        self.status.show(name)
        mark = None if device is None else device.mark()
        compiled, begun = self.meter.seconds, time.perf_counter()
        try:
            with nullcontext() if self.ranges is None else self.ranges(name):
                yield
            if device is not None and mark is not None:
                self.spent[name] -= self.meter.seconds - compiled
                self.marks.append((name, mark, device.mark()))
        finally:
            if mark is None:
                seconds = time.perf_counter() - begun - (self.meter.seconds - compiled)
                self.spent[name] = self.spent.get(name, 0.0) + seconds

    def settle(self) -> None:
        """Add the time of phases on the device, which has passed their end."""
        for name, begun, ended in self.marks:
            self.spent[name] += begun.elapsed_time(ended) / 1000
        for name in {name for name, _, _ in self.marks}:
            self.spent[name] = max(0.0, self.spent[name])  # the compiler may have begun before its pass on the device
        self.marks.clear()

    def phases(self) -> Phases:
        return Phases(*_in_order(self.spent))

    def compile_seconds(self) -> float:
        """Return the seconds that the compiler has taken in this plan."""
        return self.meter.seconds - self._compiled_before

    def seconds(self) -> float:
        """Return the seconds since the wait for the plan began, without the compiler's."""
        return time.perf_counter() - self._started - self.compile_seconds()


class MemoryTrend:
    """Remembers the peaks of the last steps."""

    def __init__(self) -> None:
        self._peaks: deque[int] = deque(maxlen=TREND_STEPS)

    def add(self, memory: Memory) -> dict[str, float]:
        """Take one more step's peak, and return the mean peak over the cap, and the least-squares slope of the peaks in
        bytes a step; the latter not before TREND_STEPS are known. Nothing where no peak can be read."""
        if memory.peak_bytes is None:
            return {}
        self._peaks.append(memory.peak_bytes)
        total, count = sum(self._peaks), len(self._peaks)
        values = {"memory_use": total / count / memory.cap_bytes} if memory.cap_bytes else {}
        if count == TREND_STEPS:
            by_place = sum(place * peak for place, peak in enumerate(self._peaks))
            values["memory_growth"] = (by_place - _MIDDLE * total) / _SPREAD
        return values


def _norm(arrays: Mapping[str, Array]) -> float:
    """Return the global norm, summed in float64."""
    return float(np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays.values())))
