"""One step of training on one rank, the same for both libraries: from a plan's samples to the step's report.

The update follows the gradient of the loss's weighted mean over the whole batch, however ranks and micro-batches cut
it, and never a mean of means. So everything on the way is a sum:

    micro-batch   gradient of  sum(losses) * s / D        D: the plan's divisor; s: float16's loss scale, else 1
    rank          + its other micro-batches               in float32, in accumulators
    group         + the other ranks, and their weights W
    update        total * D / (s * W)                     the gradient of the mean, then clipped

D is a power of two near the batch's weight W, so that dividing by it rounds nothing. The lead's planner chooses it, in
node_agent/trainctl/node_agent/planning/plans.py, and `plan.learning_rate` there too.

    loss                  objectives/losses.py; cross-entropy: backends/torch_loss.py, mlx_loss.py
    new objective         objectives/objective.py says where its two files are
    out of memory         halves the micro-batch: step/micro_batches.py. It ends the rank in the sum, in the update, and
                          once MLX has added a part of a gradient
    AdamW, weight decay   the formula, and is_decayed: backends/backend.py; torch_adamw.py, mlx_backend.py:_adamw
    torch and MLX         backends/backend.py lists where they differ
    a fence               step/progress.py says what it interrupts, and what ends first
    late ranks            get their state in step/rank.py, when runtime.py, which also calls `train`, says so
    checkpoints           which bits: checkpoints/files.py; when: checkpoints/checkpointer.py
"""

import math
from collections.abc import Mapping
from functools import partial

import numpy as np

from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.messages import Report, Soon, StepPlan
from trainctl.trainer.collective.group import Tail
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.objectives.objective import Sums, term_scales
from trainctl.trainer.step.micro_batches import MicroBatchQueue
from trainctl.trainer.step.observer import Stopwatch, Update
from trainctl.trainer.step.progress import AccumulatedBatch
from trainctl.trainer.step.rank import Rank

_CLIP_EPSILON = 1e-6
"""Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does."""


def train(rank: Rank, plan: StepPlan, started: float) -> Report:
    """Do a plan's step and return its report. `started` is when the wait for the plan began, by time.perf_counter.

    Raises AbandonedError if a fence ends the plan's generation half-way, and GroupError if the sum fails: the
    accumulators then hold what they held, and a later plan finishes the batch. Raises ProtocolError for a plan that
    doesn't follow the last step, and TrainctlError if memory can't hold a single sample.
    """
    backend, progress = rank.backend, rank.progress
    arrived = rank.dataset.wait_for(plan.cursor + plan.global_batch, partial(_wait_for_data, rank, plan))
    watch = rank.observer.begin(max(started, arrived))  # the wait for data is no part of the step
    batch = _begin(rank, plan)
    queue = MicroBatchQueue(rank.fitting, plan, rank.work(plan), rank.targets)
    scales = _step_scales(rank, plan, batch)
    while queue.pieces:
        try:
            _micro_batch(rank, plan, batch, queue, scales, watch)
        except DeviceMemoryError as error:
            queue.halve(error)
    if rank.dataset.covers(plan.cursor + 2 * plan.global_batch):  # this step's samples and the next one's
        rank.prefetch.expect(queue.of_next_step(rank.targets))
    rank.send(Soon(run=rank.who.run, rank=rank.who.rank, generation=plan.generation, seq=plan.seq))
    sums = backend.sums()  # waits for the device
    watch.settle()
    own = _own_tail(rank, batch, sums)
    with watch.phase("sync"):
        tail = rank.group.all_reduce(backend, own)  # the accumulators keep this rank's part until the sum is delivered
    with progress.exclusive(plan.generation):  # a fence waits here until the step is whole
        with watch.phase("optimizer"):
            rank.group.deliver(backend)
            update = _update(rank, plan, batch, tail)
        rank.status.show("commit")
        progress.commit(plan)
        rank.loss_scale.committed(rank.config.model.computed, update.skipped)
        report = rank.observer.step_report(
            plan, watch, queue, update, own=own, own_samples=batch.samples, total=tail, reduced=rank.group.reduced
        )
        progress.remember(report)
    return report


def _wait_for_data(rank: Rank, plan: StepPlan) -> None:
    """Show that the rank waits: one that has just been started has less of a growing file than the others. Raises
    AbandonedError at a fence."""
    rank.progress.check(plan.generation)
    rank.status.show("data", plan.step)


def _begin(rank: Rank, plan: StepPlan) -> AccumulatedBatch:
    """Return the batch that the accumulators belong to: a new one, or one that a fence left and this plan finishes."""
    with rank.progress.exclusive(plan.generation):
        if plan.step != rank.progress.last_step + 1:
            raise ProtocolError(f"received a plan for step {plan.step} after step {rank.progress.last_step}")
        batch, is_new = rank.progress.begin(plan, rank.loss_scale.value)
        if is_new:
            rank.backend.clear()
    rank.status.show("data", plan.step, (plan.generation.term, plan.generation.n))
    return batch


def _step_scales(rank: Rank, plan: StepPlan, batch: AccumulatedBatch) -> Mapping[str, float]:
    """Return what each term of the loss is multiplied by before backward. With several terms, no factor after the sum
    could give each its own divisor: all ranks alike count the step's whole weights beforehand."""
    first, *others = rank.objective.spec.weights
    scale = batch.scale / plan.divisor
    if not others:
        return {first: scale}
    whole = np.arange(plan.cursor, plan.cursor + plan.global_batch, dtype=np.int64)
    return term_scales(scale, rank.objective.weights_of(rank.sequence_lengths(whole)))


def _micro_batch(
    rank: Rank,
    plan: StepPlan,
    batch: AccumulatedBatch,
    queue: MicroBatchQueue,
    scales: Mapping[str, float],
    watch: Stopwatch,
) -> None:
    """Take the next micro-batch forward and backward, and add its gradient."""
    positions, *following = queue.pieces
    with watch.phase("data"):
        data = rank.prefetch.get(positions, following)
    adding = rank.progress.adding(plan.generation, batch, positions, rank.objective.weights(data), data.tokens)
    phase = partial(watch.phase, device=rank.backend.device)
    rank.backend.loss_and_gradient(data, scales, adding=adding, phase=phase)
    queue.done()


def _own_tail(rank: Rank, batch: AccumulatedBatch, sums: Sums) -> Tail:
    """Return what this rank adds to the sums that travel behind the gradients."""
    weights = {name: batch.weights.get(name, 0.0) for name in rank.objective.spec.weights}
    bad = int(not all(map(math.isfinite, sums.losses.values())))
    return Tail(sums.losses, weights, sums.metrics, batch.tokens, bad)


def _update(rank: Rank, plan: StepPlan, batch: AccumulatedBatch, tail: Tail) -> Update:
    """Scale, clip and update, or skip. All ranks decide alike: they have the same tail, and the same bits of the summed
    gradient, in which one rank's infinity or NaN is."""
    to_mean = plan.divisor / (batch.scale * tail.weight) if tail.weight > 0 else math.nan
    norm = rank.backend.gradient_norm() * to_mean
    if tail.bad_losses:
        return Update(norm, skipped="nan")  # or infinite
    if tail.weight <= 0:
        return Update(norm, skipped="empty")
    if not math.isfinite(norm):
        return Update(norm, skipped="overflow")
    limit = rank.config.optimizer.clip_norm
    clip = min(1.0, limit / (norm + _CLIP_EPSILON)) if limit > 0 else 1.0
    with rank.observer.update(plan.step):
        rank.backend.update(plan.learning_rate, to_mean * clip)
    return Update(norm, clip)
