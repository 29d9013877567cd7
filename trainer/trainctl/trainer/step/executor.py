"""The executor of plans: micro-batches into accumulators, the group's sum, clip, update and report.

Each micro-batch's loss sum is divided by the plan's constant D before backward; after the reduce everything is
multiplied by D / global weight. So the gradient is that of the weighted mean over the whole batch, however it was
cut, and never a mean of means.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
import numpy as np

from trainctl.protocol.batch.flops import StepFlops
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.messages import (
    FREED,
    EvaluationReport,
    FromTrainer,
    Probed,
    RankWork,
    Report,
    Soon,
    StepPlan,
)
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.adapters.dropout import token_keys
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.collective.group import Group, Reduced, Solo, Tail
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.data.prefetch import Prefetch
from trainctl.trainer.data.training_data import TrainingData
from trainctl.trainer.objectives.objective import Sums
from trainctl.trainer.step import probe
from trainctl.trainer.step.held_out_sums import HeldOutSums
from trainctl.trainer.step.loss_scale import LossScale
from trainctl.trainer.step.memory_trend import MemoryTrend
from trainctl.trainer.step.micro_batches import MicroBatches, PlanSums
from trainctl.trainer.step.progress import HalfBatch, Progress
from trainctl.trainer.step.state_transfer import take_lowest
from trainctl.trainer.step.stopwatch import Ranges, Stopwatch
from trainctl.trainer.step.update_ratio import UpdateRatio

_CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""
_NOTHING: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Identity:
    """Who this trainer is."""

    run: str
    node: str
    rank: int


@dataclass(frozen=True)
class Settings:
    """What the executor needs of the run file."""

    seed: int
    dtype: str
    clip_norm: float
    micro_tokens: int
    prefetch: int = 0
    workers: int = 1
    update_ratio_every: int = 0
    tf32: bool = False

    @classmethod
    def of(cls, config: RunFile, node: str) -> "Settings":
        """Those of a node's ranks."""
        own = config.nodes.get(node, NodeTable()).micro_tokens
        tokens = config.batch.micro_tokens if own is None else own
        data, optimizer = config.data, config.optimizer
        return cls(
            config.run.seed, config.model.computed, optimizer.clip_norm, tokens, data.prefetch, data.workers,
            optimizer.update_ratio_every, config.model.tf32,
        )  # fmt: skip


class Executor:
    """Runs one plan at a time on the main thread; `send` passes a message to the agent without waiting."""

    def __init__(
        self, who: Identity, settings: Settings, backend: Backend, dataset: TrainingData, progress: Progress,
        status: StatusWriter, send: Callable[[FromTrainer], None],
    ) -> None:  # fmt: skip
        self._who, self._settings, self._backend, self._dataset = who, settings, backend, dataset
        self._progress, self._status, self._send = progress, status, send
        self._objective = backend.parts.objective
        self.group: Group = Solo()
        self.flops: StepFlops | None = None  # of the model, if its sizes are known
        self.loss_scale = LossScale.of(settings.dtype)
        self.ranges: Ranges | None = None  # of the phases, while steps are profiled
        self._micro_batches = MicroBatches(settings.micro_tokens)
        self._prefetch = Prefetch(self._data, settings.prefetch, settings.workers)
        self._memory_trend = MemoryTrend()
        self._update_ratio = UpdateRatio(backend, settings.update_ratio_every)

    def close(self) -> None:
        """Leave the group, and end the threads that assemble batches."""
        self.group.close()
        self._prefetch.close()

    def train(self, plan: StepPlan, started: float) -> Report:
        """One step. `started` is when the wait for the plan began (perf_counter). Raises AbandonedError if fenced
        half-way, GroupError if the sum failed (either way the accumulators hold what they held), ProtocolError for a
        plan that doesn't follow the last step, TrainctlError if memory cannot suffice."""
        supplied = self._dataset.wait_for(plan.cursor + plan.global_batch, lambda: self._wait_for_data(plan))
        watch = self._begin_plan(max(started, supplied))  # the wait for data is no part of the step
        work = self._work(plan)
        batch = self._begin(plan)
        scales, sums = self._step_scales(plan, batch), PlanSums()

        def once(positions: Indices, following: Iterator[Indices]) -> None:
            with watch.phase("data"):
                data = self._prefetch.get(positions, following)
            self._micro_batch(plan, batch, positions, data, scales, watch)

        self._micro_batches.each(plan, work, sums, once, self._targets)
        if self._dataset.covers(plan.cursor + 2 * plan.global_batch):
            self._prefetch.expect(self._micro_batches.of_next_step(plan, work, self._targets))
        self._send(Soon(run=self._who.run, rank=self._who.rank, generation=plan.generation, seq=plan.seq))
        totals = self._backend.totals(with_norm=self.group.is_alone)
        watch.settle(self._backend)
        own = self._tail(batch, totals.sums)
        with watch.phase("sync"):
            tail = self.group.all_reduce(self._backend, own)
        with self._progress.exclusive(plan.generation):
            with watch.phase("optimizer"):
                self.group.deliver(self._backend)
                norm, clip, skipped = self._update(plan, batch, tail, totals.norm)
            self._status.show("commit")
            values = {"clip_scale": clip, **_own_loss(own), **self._metrics(tail), **_of_sum(self.group.reduced)}
            self._progress.commit(plan)
            self.loss_scale.committed(self._settings.dtype, skipped)
            values |= self._update_ratio.take()
            sums.loss_sum, sums.weight, sums.samples = tail.loss_sum, tail.weight, batch.samples
            sums.tokens, sums.own_tokens = tail.tokens, own.tokens
            report = self._report(plan, sums, watch, own.weight, values, grad_norm=norm, skipped=skipped)
            self._progress.remember(report)
        return report

    def _flop_rates(self, plan: StepPlan, sums: PlanSums, seconds: float) -> Mapping[str, float]:
        """Operations per second, the rank's and the run's, in 10^12; nothing of a plan that trains on no token."""
        if self.flops is None or not sums.tokens or seconds <= 0:
            return _NOTHING
        unit, each = seconds * 1e12, self._objective.row.sequences
        return {
            "tflops": self.flops.of(sums.own_tokens, sums.samples * each) / unit,
            "run_tflops": self.flops.of(sums.tokens, plan.global_batch * each) / unit,
        }

    def _wait_for_data(self, plan: StepPlan) -> None:
        """A rank that has just been started has less of a growing file than the others."""
        self._progress.check(plan.generation)
        self._status.show("data", plan.step)

    def evaluate(self, plan: StepPlan, started: float) -> EvaluationReport:
        """Loss sums over held-out samples, the rank's own; accumulators are left alone. Raises as `train`."""
        watch = self._begin_plan(started)
        work = self._work(plan)
        sums, found = PlanSums(), HeldOutSums(self._objective)

        def measure(indices: Indices, _: Iterator[Indices]) -> None:
            self._progress.check(plan.generation)
            self._status.show("evaluate")  # once more for each, as a sign of life
            batch = self._dataset.held_out_batch(indices)
            found.add(indices, batch, self._backend.evaluate(batch))

        with watch.phase("evaluate"):
            self._micro_batches.each(plan, work, sums, measure, self._dataset.held_out_targets)
        sums.loss_sum, sums.weight, sums.samples = found.loss_sum, found.weight, found.samples
        report = msgspec.structs.asdict(self._report(plan, sums, watch, sums.weight))
        return EvaluationReport(
            **report, losses=found.losses, weights=found.weights, sums=found.metrics, pairs=found.pairs
        )

    def measure(self, plan: StepPlan, started: float) -> Report:
        """How fast forward and backward go over training samples; where there is more than one micro-batch, the first
        only warms up. Nothing is added. Raises as `train`."""
        watch, work = self._begin_plan(started), self._work(plan)
        sums, timed = PlanSums(), list[tuple[int, float]]()

        def once(positions: Indices, _: Iterator[Indices]) -> None:
            self._progress.check(plan.generation)
            data = self._data(self._dataset.at_hand(positions))
            begun = watch.seconds()
            with watch.phase("forward"):
                self._backend.forward(data, *self._scales(1 / plan.divisor, self._objective.weights(data)))
            with watch.phase("backward"):
                self._backend.backward()
                self._backend.wait()
            timed.append((len(positions), watch.seconds() - begun))
            self._backend.forget()

        self._micro_batches.each(
            plan, work, sums, once, lambda positions: self._targets(self._dataset.at_hand(positions))
        )
        kept = timed[1:] or timed
        rate = sum(count for count, _ in kept) / sum(seconds for _, seconds in kept) if kept else None
        return msgspec.structs.replace(self._report(plan, sums, watch, 0.0), samples_per_second=rate)

    def sync(self, plan: StepPlan, started: float) -> Report:
        """Take over the state of the group's lowest rank; the report says how far this one had drifted. Raises
        AbandonedError or GroupError."""
        watch = self._begin_plan(started)
        with watch.phase("sync"):
            drift = take_lowest(self.group, plan.generation, self._backend, self._progress)
        return msgspec.structs.replace(self._report(plan, PlanSums(), watch, 0.0), drift=drift)

    def probe(self, plan: StepPlan, started: float, family: str) -> Probed:
        """The log-probabilities of the data's first tokens, by forward passes; `family` is the model's. Raises as
        `train`."""
        watch, batch = Stopwatch(self._status, started), self._dataset.probe_batch()
        with watch.phase("probe"):
            found = probe.probe(
                self._backend, batch, tf32=self._settings.tf32, check=lambda: self._progress.check(plan.generation)
            )
        return probe.probed(self._report(plan, PlanSums(), watch, 0.0), self._backend, batch, family, *found)

    def defragment(self, plan: StepPlan, started: float) -> Report:
        """Give what the allocator keeps unused back to the device. State and accumulators are left alone."""
        watch, before = self._begin_plan(started), self._backend.memory().cache_bytes
        self._backend.discard()
        report, after = self._report(plan, PlanSums(), watch, 0.0), self._backend.memory().cache_bytes
        if before is None or after is None:
            return report
        return msgspec.structs.replace(report, values={**report.values, FREED: float(max(0, before - after))})

    def written(self, plan: StepPlan, started: float, failure: str | None) -> Report:
        """The report of a checkpoint plan, the checkpoint itself left for the caller to add."""
        watch = self._begin_plan(started)
        return self._report(plan, PlanSums(), watch, 0.0, skipped=failure)

    def _begin_plan(self, started: float) -> Stopwatch:
        """Time and memory are this plan's from here on."""
        self._backend.reset_peak()
        return Stopwatch(self._status, started, self._backend.compile_meter, self.ranges)

    def _begin(self, plan: StepPlan) -> HalfBatch:
        with self._progress.exclusive(plan.generation):
            if plan.step != self._progress.last_step + 1:
                raise ProtocolError(f"received a plan for step {plan.step} after step {self._progress.last_step}")
            batch, is_new = self._progress.begin(plan, self.loss_scale.value)
            if is_new:
                self._backend.clear()
        self._status.show("data", plan.step, (plan.generation.term, plan.generation.n))
        return batch

    def _micro_batch(
        self, plan: StepPlan, batch: HalfBatch, positions: Indices, data: Batch, scales: tuple[float, ...],
        watch: Stopwatch,
    ) -> None:  # fmt: skip
        """One forward and backward, added only when whole and only if the generation still stands."""
        with watch.on_device("forward", self._backend):
            self._backend.forward(data, *scales)
        with watch.on_device("backward", self._backend):
            self._backend.backward()
            with self._progress.exclusive(plan.generation):
                self._backend.accumulate()
                batch.add(positions, self._objective.weights(data), data.tokens)

    def _step_scales(self, plan: StepPlan, batch: HalfBatch) -> tuple[float, ...]:
        """What each term of the loss is multiplied by before backward. With several terms, no factor after the sum
        could give each its own divisor: the step's whole weights are then taken from its samples beforehand, by all
        ranks alike."""
        scale, names = batch.scale / plan.divisor, self._objective.row.weights
        if len(names) == 1:
            return (scale,)
        whole = np.arange(plan.cursor, plan.cursor + plan.global_batch, dtype=np.int64)
        return self._scales(scale, self._objective.weights(self._data(whole)))

    def _scales(self, scale: float, weights: Mapping[str, float]) -> tuple[float, ...]:
        first, *others = weights.values()
        return (scale, *(scale * first / other if other else 0.0 for other in others))

    def _tail(self, batch: HalfBatch, sums: Sums) -> Tail:
        """What this rank adds to the sums."""
        weights = {name: batch.weights.get(name, 0.0) for name in self._objective.row.weights}
        bad = int(not all(map(math.isfinite, sums.losses.values())))
        return Tail(sums.losses, weights, sums.metrics, batch.tokens, bad)

    def _metrics(self, tail: Tail) -> dict[str, float]:
        """The objective's, over all ranks."""
        rows = self._objective.row.metrics
        return {row.name: tail.metrics[row.name] / tail.weights[row.weight] for row in rows if tail.weights[row.weight]}

    def _data(self, positions: Indices) -> Batch:
        batch = self._dataset.batch(self._samples(positions))
        if self._backend.parts.adapter is None or not self._backend.parts.adapter.table.dropout:
            return batch
        rows = (positions[:, None] * batch.sequences + np.arange(batch.sequences)).ravel()
        return replace(batch, keys=token_keys(self._settings.seed, rows, batch.inputs.shape[1]))

    def _targets(self, positions: Indices) -> Indices:
        return self._dataset.targets(self._samples(positions))

    def _samples(self, positions: Indices) -> Indices:
        return self._dataset.samples_at(positions, self._settings.seed)

    def _update(
        self, plan: StepPlan, batch: HalfBatch, tail: Tail, found: float | None
    ) -> tuple[float, float, str | None]:  # fmt: skip
        """Scale, clip and update, or skip; `found`: the accumulators' norm, if it is known. The norm before clipping,
        what clipping multiplied by, why it was skipped."""
        to_mean = plan.divisor / (batch.scale * tail.weight) if tail.weight > 0 else math.nan
        norm = self._backend.gradient_norm(found) * to_mean
        skipped = _skip_reason(tail, norm)
        clip = _clip_scale(norm, self._settings.clip_norm) if skipped is None else 1.0
        if skipped is None:
            with self._update_ratio.measured(plan.step):
                self._backend.update(plan.learning_rate, to_mean * clip)
        return norm, clip, skipped

    def _work(self, plan: StepPlan) -> RankWork:
        mine = (work for work in plan.work if work.rank == self._who.rank)
        return next(mine, RankWork(self._who.rank, (), 1))

    def _report(
        self, plan: StepPlan, sums: PlanSums, watch: Stopwatch, own_weight: float,
        values: Mapping[str, float] = _NOTHING, *, grad_norm: float = 0.0, skipped: str | None = None,
    ) -> Report:  # fmt: skip
        memory, seconds, compiled = self._backend.memory(), watch.seconds(), watch.compile_seconds()
        trend = self._memory_trend.add(memory) if plan.kind == "train" else _NOTHING
        rates = self._flop_rates(plan, sums, seconds)
        if compiled:
            rates = {**rates, "compile_seconds": compiled}
        return Report(
            run=self._who.run, rank=self._who.rank, generation=plan.generation, seq=plan.seq, kind=plan.kind,
            step=plan.step, loss_sum=sums.loss_sum, weight=sums.weight, own_weight=own_weight, own_samples=sums.samples,
            tokens=sums.tokens, own_tokens=sums.own_tokens, grad_norm=grad_norm, skipped=skipped,
            micro_batch=sums.micro_batch, replays=sums.replays, phases=watch.phases(), step_seconds=seconds,
            finished_at=time.time(),
            values={**values, **memory.values, **self._backend.memory_parts(memory), **trend, **rates},
        )  # fmt: skip


def _own_loss(own: Tail) -> dict[str, float]:
    """The mean loss over the rank's own samples, nats per unit of weight; nothing without a counted token."""
    return {"own_loss": own.loss_sum / own.weight} if own.weight > 0 else {}


def _of_sum(reduced: Reduced | None) -> dict[str, float]:
    """Bytes and rate of the step's sum; nothing of a rank alone."""
    if reduced is None:
        return {}
    rate = {"sum_bytes_per_second": reduced.bytes / reduced.seconds} if reduced.seconds > 0 else {}
    return {"sum_bytes": float(reduced.bytes), **rate}


def _skip_reason(tail: Tail, norm: float) -> str | None:
    """Why parameters stay as they are: from the reduced tail, and from whether the reduced gradient is finite, which
    is the same on all ranks since its bits are; one rank's infinity or NaN is in the sum."""
    if tail.bad_losses:
        return "nan"
    if tail.weight <= 0:
        return "empty"
    return None if math.isfinite(norm) else "overflow"


def _clip_scale(norm: float, limit: float) -> float:
    return min(1.0, limit / (norm + _CLIP_EPSILON)) if limit > 0 else 1.0
