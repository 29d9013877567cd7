"""A loaded rank, which the training loop and the side plans work with, and copies of one rank's state to others: to
ranks that come late or are behind when a group is formed, to all when replicas have drifted apart.

Weights and the optimizer's slots travel one after another, bit for bit; then AdamW's count and the loss scale. What a
checkpoint saves is in checkpoints/files.py.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from trainctl.protocol.config.run_tables import NodeTable, RunFile, micro_tokens_of
from trainctl.protocol.messages import Form, FromTrainer, Generation, RankWork, StepPlan
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.adapters.lora import token_keys
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.collective.group import Group, Solo
from trainctl.trainer.data.batch import Batch, Prefetch
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.growing_dataset import TrainingData
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.step.micro_batches import FittingLimits
from trainctl.trainer.step.observer import Observer
from trainctl.trainer.step.progress import LossScale, Progress


@dataclass(frozen=True)
class Identity:
    """The run, node and rank of this trainer."""

    run: str
    node: str
    rank: int


class Rank:
    """Carries out one plan at a time on the main thread."""

    def __init__(
        self,
        who: Identity,
        config: RunFile,
        backend: Backend,
        dataset: TrainingData,
        progress: Progress,
        status: StatusWriter,
        *,
        send: Callable[[FromTrainer], None],
    ) -> None:
        """`send` passes a message to the agent without waiting."""
        self.who, self.config, self.backend, self.dataset = who, config, backend, dataset
        self.progress, self.status, self.send = progress, status, send
        self.objective = backend.recipe.objective
        self.group: Group = Solo()
        self.loss_scale = LossScale.of(config.model.computed)
        self.fitting = FittingLimits(micro_tokens_of(config, config.nodes.get(who.node, NodeTable())))
        self.prefetch = Prefetch(self.batch, config.data.prefetch, config.data.workers)
        self.observer = Observer(who.run, who.rank, backend, status, config.optimizer.update_ratio_every)

    def close(self) -> None:
        """Leave the group, and end the threads that assemble batches."""
        self.group.close()
        self.prefetch.close()

    def work(self, plan: StepPlan) -> RankWork:
        """Return the rank's part of a plan, which may be nothing."""
        mine = (work for work in plan.work if work.rank == self.who.rank)
        return next(mine, RankWork(self.who.rank, (), 1))

    def batch(self, positions: Indices) -> Batch:
        """Return the samples at positions of the run, with the keys of the adapter's dropout where it has one."""
        batch, adapter = self.dataset.batch(self._samples(positions)), self.backend.recipe.adapter
        if adapter is None or not adapter.table.dropout:
            return batch
        rows = (positions[:, None] * batch.sequences + np.arange(batch.sequences)).ravel()
        return replace(batch, keys=token_keys(self.config.run.seed, rows, batch.inputs.shape[1]))

    def targets(self, positions: Indices) -> Indices:
        """Return the length of the sample at each position, in tokens to learn."""
        return self.dataset.targets(self._samples(positions))

    def sequence_lengths(self, positions: Indices) -> Indices:
        """Return the lengths of the answers of the pairs at positions, one after another."""
        assert isinstance(self.dataset, Dataset), "pairs are whole files"
        return self.dataset.sequence_lengths(self._samples(positions))

    def _samples(self, positions: Indices) -> Indices:
        return self.dataset.samples_at(positions, self.config.run.seed)


def copy_state_to_ranks_behind(rank: Rank, group: Group, form: Form) -> None:
    """Copy the state of rank `form.source` to the late ranks, `form.behind`, which then stand at the form's step. All
    ranks of the group call it. Raises GroupError or AbandonedError; a rank behind that has received only a part of the
    state then holds a torn one (`Progress.whole` is False), and trains again only after a whole copy."""
    backend, scale, progress = rank.backend, rank.loss_scale, rank.progress
    takes = rank.who.rank in form.behind
    for part in ("weights", *backend.slots):
        arrays = group.share(form.source, functools.partial(backend.copy_out, part))
        if takes and arrays is not None:
            with progress.exclusive(form.generation):
                progress.tear()
                backend.copy_in(part, arrays)
    updates, value, good_steps = group.share_numbers(form.source, (backend.updates, scale.value, scale.good_steps))
    if takes:
        with progress.exclusive(form.generation):
            backend.updates = int(updates)
            scale.value, scale.good_steps = value, int(good_steps)
            progress.take_over(form.step, form.cursor)


def copy_state_of_lowest_rank(rank: Rank, generation: Generation) -> float:
    """Copy the weights and slots of the group's lowest rank, which is at the same step, to this one. Return the drift:
    the largest difference between a weight of this rank and the lowest's, over the root mean square of the lowest's.
    Raises GroupError or AbandonedError; stopped half-way, the state is still one of this step, but for rounding."""
    backend, group, drift = rank.backend, rank.group, 0.0
    for part in ("weights", *backend.slots):
        arrays = group.share(None, functools.partial(backend.copy_out, part))
        if arrays is None or group.is_source(None):
            continue
        if part == "weights":
            drift = _drift(backend.copy_out("weights"), arrays)
        with rank.progress.exclusive(generation):
            rank.progress.version += 1
            backend.copy_in(part, arrays)
    return drift


def _drift(own: Mapping[str, Array], theirs: Mapping[str, Array]) -> float:
    largest = max(float(np.abs(own[name] - theirs[name]).max(initial=0.0)) for name in own)
    squares = sum(float(np.sum(np.square(array, dtype=np.float64))) for array in theirs.values())
    count = sum(array.size for array in theirs.values())
    return largest / math.sqrt(squares / count) if squares else largest
