"""Before the first step: a run's reference log-probabilities from the node's cache, or computed into it.

A run's held-out files have a cache of their own.
"""

import functools
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainctl.protocol.config.micro_batches import micro_of
from trainctl.protocol.config.objectives import caches_reference
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.files.durable_files import sync, sync_all
from trainctl.protocol.record.paths import VALUES_NAME, stored_digest
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.atomic_folder import part_of, remove_parts
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.common.logs import log
from trainctl.trainer.common.reference_cache import (
    DTYPE,
    ReferenceKey,
    Values,
    compute_of,
    read_values,
    spans,
    write_notes,
)
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.data.token_cache import Report, no_report
from trainctl.trainer.data.tokenizing import make_cache
from trainctl.trainer.references.shared_pass import AgentLine, Look, SharedPass, StoredValues, Supply, check_sizes

AT_ONCE = 256
"""Samples computed between two writes; the longest of them come first."""


@dataclass(frozen=True)
class ReferenceSettings:
    """The reference of a run on a node, and where its values are kept."""

    folder: Path  # of the node's caches
    model: str  # digest of the base model's files
    compute: str  # as `compute_of` says
    batch_tokens: int  # in one forward pass

    @classmethod
    def of(cls, config: RunFile, node: str, folder: Path, model: str) -> "ReferenceSettings":
        """Return the settings of a node. A forward and backward pass of so many tokens fits into its memory."""
        table = config.nodes.get(node, NodeTable())
        tokens = table.micro_tokens if table.micro_tokens is not None else config.batch.micro_tokens
        sequences = 2 * micro_of(config, table)
        return cls(folder, model, compute_of(config.model), tokens or sequences * config.data.sequence_length)


@dataclass(frozen=True)
class Company:
    """The parts with which a rank computes the values together with the run's other ranks."""

    run: str
    rank: int
    line: AgentLine


def wants_reference(config: RunFile) -> bool:
    """Return whether a run needs the values before its first step."""
    return caches_reference(config.objective, has_adapter=config.adapter.kind != "full")


class ReferenceModel:
    """A loaded model in which nothing has been trained, and its data."""

    def __init__(self, backend: Backend, dataset: Dataset, batch_tokens: int) -> None:
        """`batch_tokens`: in one forward pass, with padding; at least one sample."""
        self._backend, self._dataset, self._batch_tokens = backend, dataset, batch_tokens
        self.computed = 0  # samples, again if they were computed twice
        self.targets, self.counts = dataset.usable_targets()

    def values(self, first: int, samples: int, look: Look) -> Values:
        """Return the nats of the counted tokens of so many usable samples, in their order. Raises TrainctlError if
        memory isn't enough for one sample, InvalidInputError naming a sample whose values aren't finite, and what
        `look` does."""
        numbers = np.arange(first, first + samples, dtype=np.int64)
        counts = self.counts[numbers]
        starts = np.cumsum(counts) - counts
        values, done = np.empty(int(counts.sum()), np.float32), 0
        order = numbers[np.argsort(-self.targets[numbers], kind="stable")]  # the longest first
        while done < len(order):
            size = max(1, self._batch_tokens // int(self.targets[order[done]]))
            batch = order[done : done + size]
            values[spans(starts[batch - first], counts[batch - first])] = self._computed(batch)
            done += len(batch)
            self.computed += len(batch)
            look(done)
        wrong = np.flatnonzero(~np.isfinite(values))
        if len(wrong):
            number = int(numbers[np.searchsorted(np.cumsum(counts), wrong[0], side="right")])
            place = self._dataset.place(self._dataset.index(number))
            raise InvalidInputError(place, 'the reference has no finite log-probability; try model.dtype = "float32"')
        return values

    def _computed(self, numbers: Indices) -> Values:
        """Return the values of one batch, in halves if memory is short."""
        batch = self._dataset.usable_batch(numbers)
        try:
            values: Values = self._backend.token_log_probabilities(batch, reference=True)[batch.counted > 0]
        except DeviceMemoryError as error:
            if len(numbers) == 1:
                raise TrainctlError(f"out of memory with one sample for the reference: {error}") from None
        else:
            return values
        half = len(numbers) // 2
        self._batch_tokens = max(1, half * int(self.targets[numbers[0]]))
        return np.concatenate([self._computed(numbers[:half]), self._computed(numbers[half:])])


def prepare_reference(
    settings: ReferenceSettings,
    dataset: Dataset,
    backend: Backend,
    report: Report = no_report,
    company: Company | None = None,
) -> None:
    """Attach the values of all samples, for training and held out; without `company`, the rank computes them alone.
    `report` takes the samples done and all there are. Raises InvalidInputError for a cache that can't be read
    and as `check_sizes`, TrainctlError as `SharedPass.run`, and as `ReferenceModel.values`."""
    for part in (dataset, *([dataset.evaluation] if dataset.evaluation is not None else [])):
        key = part.reference_key(settings.model, settings.compute)
        target = settings.folder / key.name
        model = ReferenceModel(backend, part, settings.batch_tokens)
        if company is not None:
            check_sizes(model.counts, "run file", has_adapter=backend.recipe.adapter is not None)
            _compute_together(key, model, target, company, report)
        elif not target.is_dir():
            make_cache(target, functools.partial(_write, key, model), report)
        log.info("reference: computed %s of %s pairs here", f"{model.computed:,}", f"{part.usable:,}")
        part.attach_reference(read_values(target, key))


def _write(key: ReferenceKey, model: ReferenceModel, work: Path, report: Report) -> None:
    samples = len(model.counts)

    def look(done: int) -> None:
        report(first + done, samples)

    with (work / VALUES_NAME).open("wb") as file:
        for first in range(0, samples, AT_ONCE):
            file.write(model.values(first, min(AT_ONCE, samples - first), look).astype(DTYPE).tobytes())
    write_notes(work, key)


def _compute_together(key: ReferenceKey, model: ReferenceModel, target: Path, company: Company, report: Report) -> None:
    """Get the values that all ranks of the run have. They replace this node's own values if those differ."""
    supply: Supply = model
    own_digest = ""
    if target.is_dir():
        supply, own_digest = StoredValues(read_values(target, key), model.counts), stored_digest(target)
    shared = SharedPass(
        company.run, company.rank, key, supply, company.line, report, counts=model.counts, targets=model.targets
    )
    remove_parts(target.parent)
    with part_of(target) as work:
        digest = shared.run(work / VALUES_NAME, own_digest)
        if digest == stored_digest(target):
            return  # as before, or another rank with the same folder was first
        write_notes(work, key)
        sync_all(work)
        shutil.rmtree(target, ignore_errors=True)
        try:
            work.rename(target)
        except OSError:
            if digest != stored_digest(target):
                raise
        sync(target.parent)
