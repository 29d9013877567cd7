"""The plans that train nothing: evaluate, measure, synchronize, probe, give memory back, and acknowledge.

Each is carried out on a rank's main thread, and leaves the accumulators alone. `started` is when the wait for the plan
began, by time.perf_counter. They raise AbandonedError if a fence ends the plan's generation, GroupError if a sum fails,
and TrainctlError if memory can't hold a single sample.
"""

from functools import partial

import msgspec

from trainctl.protocol.config.objectives import ANSWER_TOKENS
from trainctl.protocol.messages import FREED, EvaluatedPair, EvaluationReport, Probed, Report, StepPlan, followed_pairs
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.objectives.losses import chosen, rejected
from trainctl.trainer.objectives.objective import Objective, Sums, reported_loss_sum, term_scales
from trainctl.trainer.step import preflight
from trainctl.trainer.step.micro_batches import MicroBatchQueue
from trainctl.trainer.step.observer import Stopwatch
from trainctl.trainer.step.rank import Rank, copy_state_of_lowest_rank


class HeldOutSums:
    """Sums over the held-out samples of a rank's part of an evaluation, by name."""

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.losses = dict.fromkeys(objective.spec.weights, 0.0)
        self.weights = dict.fromkeys((*objective.spec.weights, ANSWER_TOKENS), 0.0)
        self.metrics: dict[str, float] = {}
        self.samples = 0
        self.pairs: tuple[EvaluatedPair, ...] = ()  # the first and the worst of the rank's, by index

    def add(self, indices: Indices, batch: Batch, sums: Sums) -> None:
        """Add a micro-batch of held-out samples, with what `Backend.evaluate` gave."""
        weights = {ANSWER_TOKENS: batch.weight, **self._objective.weights(batch)}
        for totals, parts in ((self.losses, sums.losses), (self.weights, weights), (self.metrics, sums.metrics)):
            for name, value in parts.items():
                totals[name] = totals.get(name, 0.0) + value
        self.samples += len(batch)
        if sums.rewards is not None:
            better, worse = chosen(sums.rewards).tolist(), rejected(sums.rewards).tolist()
            pairs = map(EvaluatedPair, indices.tolist(), better, worse)
            self.pairs = followed_pairs([*self.pairs, *pairs])

    @property
    def weight(self) -> float:
        """The first weight: reports have the loss per unit of it."""
        return self.weights[self._objective.spec.weight_unit]

    @property
    def loss_sum(self) -> float:
        """The rank's own mean loss, each term divided by its own weight, times `weight`."""
        return reported_loss_sum(self.losses, self.weights)


def evaluate(rank: Rank, plan: StepPlan, started: float) -> EvaluationReport:
    """Return the rank's loss sums over its part of the held-out samples."""
    watch, held_out = rank.observer.begin(started), HeldOutSums(rank.objective)
    queue = MicroBatchQueue(rank.fitting, plan, rank.work(plan), rank.dataset.held_out_targets)
    with watch.phase("evaluate"):
        while queue.pieces:
            rank.progress.check(plan.generation)
            rank.status.show("evaluate")  # once more for each, as a sign of life
            indices = queue.pieces[0]
            batch = rank.dataset.held_out_batch(indices)
            try:
                held_out.add(indices, batch, rank.backend.evaluate(batch))
                queue.done()
            except DeviceMemoryError as error:
                queue.halve(error)
    weight = held_out.weight
    report = rank.observer.report(
        plan,
        watch,
        queue,
        loss_sum=held_out.loss_sum,
        weight=weight,
        own_weight=weight,
        own_samples=held_out.samples,
    )
    return EvaluationReport(
        **msgspec.structs.asdict(report),
        losses=held_out.losses,
        weights=held_out.weights,
        sums=held_out.metrics,
        pairs=held_out.pairs,
    )


def measure(rank: Rank, plan: StepPlan, started: float) -> Report:
    """Return how fast forward and backward passes go over training samples. Where there is more than one micro-batch,
    the first only warms up. Nothing is added to the accumulators."""
    watch, timed = rank.observer.begin(started), list[tuple[int, float]]()
    device = rank.backend.device
    queue = MicroBatchQueue(rank.fitting, plan, rank.work(plan), lambda at: rank.targets(rank.dataset.at_hand(at)))
    while queue.pieces:
        rank.progress.check(plan.generation)
        positions = queue.pieces[0]
        batch = rank.batch(rank.dataset.at_hand(positions))
        begun = watch.seconds()
        try:
            scales = term_scales(1 / plan.divisor, rank.objective.weights(batch))
            rank.backend.loss_and_gradient(batch, scales, adding=None, phase=partial(watch.phase, device=device))
            device.wait()
            watch.settle()
            timed.append((len(positions), watch.seconds() - begun))
            queue.done()
        except DeviceMemoryError as error:
            queue.halve(error)
    kept = timed[1:] or timed
    rate = sum(count for count, _ in kept) / sum(seconds for _, seconds in kept) if kept else None
    return msgspec.structs.replace(rank.observer.report(plan, watch, queue), samples_per_second=rate)


def synchronize(rank: Rank, plan: StepPlan, started: float) -> Report:
    """Take over the state of the group's lowest rank, and report how far this one had drifted."""
    watch = rank.observer.begin(started)
    with watch.phase("sync"):
        drift = copy_state_of_lowest_rank(rank, plan.generation)
    return msgspec.structs.replace(rank.observer.report(plan, watch), drift=drift)


def probe(rank: Rank, plan: StepPlan, started: float, family: str) -> Probed:
    """Return the log-probabilities of the data's first tokens, by forward passes; `family` is the model's."""
    watch, batch = rank.observer.begin(started), rank.dataset.probe_batch()

    def check() -> None:
        rank.progress.check(plan.generation)

    with watch.phase("probe"):
        log_probabilities, noise = preflight.probe(rank.backend, batch, tf32=rank.config.model.tf32, check=check)
    report = rank.observer.report(plan, watch)
    return preflight.probed(report, rank.backend, batch, family, log_probabilities, noise)


def defragment(rank: Rank, plan: StepPlan, started: float) -> Report:
    """Give what the allocator keeps unused back to the device, and report how much that was."""
    watch, device = rank.observer.begin(started), rank.backend.device
    before = device.memory.read().cache_bytes
    device.free_cache()
    report, after = rank.observer.report(plan, watch), device.memory.read().cache_bytes
    if before is None or after is None:
        return report
    return msgspec.structs.replace(report, values={**report.values, FREED: float(max(0, before - after))})


def acknowledge(rank: Rank, plan: StepPlan, watch: Stopwatch, failure: str | None) -> Report:
    """Return the report of a plan that others carry out, such as a checkpoint, with why it failed. `watch` began before
    they did."""
    return rank.observer.report(plan, watch, skipped=failure)
