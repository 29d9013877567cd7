"""Before the first step: a run's reference log-probabilities from the node's cache, or computed into it.

A run's held-out files have a cache of their own.
"""

import functools
import shutil
from pathlib import Path
from typing import NamedTuple

from trainctl.protocol.config.micro_batches import micro_of
from trainctl.protocol.config.objectives import caches_reference
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.files.durable_files import sync, sync_all
from trainctl.protocol.record.reference_files import VALUES_NAME, stored_digest
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.atomic_folder import part_of, remove_parts
from trainctl.trainer.common.logs import log
from trainctl.trainer.common.reference_cache import DTYPE, ReferenceKey, compute_of, read_values, write_notes
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.token_cache import Report, no_report
from trainctl.trainer.data.tokenizing import make_cache
from trainctl.trainer.references.reference_model import ReferenceModel
from trainctl.trainer.references.shared_pass import AgentLine, SharedPass, StoredValues, Supply, check_sizes

AT_ONCE = 256
"""Samples computed between two writes; the longest of them come first."""


class ReferenceSettings(NamedTuple):
    """What the reference is, and where its values are kept."""

    folder: Path  # of the node's caches
    model: str  # digest of the base model's files
    compute: str  # as `compute_of` says
    batch_tokens: int  # in one forward pass

    @classmethod
    def of(cls, config: RunFile, node: str, folder: Path, model: str) -> "ReferenceSettings":
        """Those of a node. A forward and backward pass of so many tokens fits into its memory."""
        table = config.nodes.get(node, NodeTable())
        tokens = table.micro_tokens if table.micro_tokens is not None else config.batch.micro_tokens
        sequences = 2 * micro_of(config, table)
        return cls(folder, model, compute_of(config.model), tokens or sequences * config.data.sequence_length)


def wants_reference(config: RunFile) -> bool:
    """Whether a run needs the values before its first step."""
    return caches_reference(config.objective, has_adapter=config.adapter.kind != "full")


class Company(NamedTuple):
    """What a rank needs to compute the values together with the run's other ranks."""

    run: str
    rank: int
    line: AgentLine


def prepare_reference(
    settings: ReferenceSettings, dataset: Dataset, backend: Backend, report: Report = no_report,
    company: Company | None = None,
) -> None:  # fmt: skip
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
    with (work / VALUES_NAME).open("wb") as file:
        for first in range(0, samples, AT_ONCE):
            look = functools.partial(_add, report, first, samples)
            file.write(model.values(first, min(AT_ONCE, samples - first), look).astype(DTYPE).tobytes())
    write_notes(work, key)


def _add(report: Report, first: int, samples: int, done: int) -> None:
    report(first + done, samples)


def _compute_together(
    key: ReferenceKey, model: ReferenceModel, target: Path, company: Company, report: Report
) -> None:  # fmt: skip
    """Get the values that all ranks of the run have. They replace this node's own values if those differ."""
    supply: Supply = model
    own_digest = ""
    if target.is_dir():
        supply, own_digest = StoredValues(read_values(target, key), model.counts), stored_digest(target)
    shared = SharedPass(company.run, company.rank, key, model.counts, model.targets, supply, company.line, report)
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
