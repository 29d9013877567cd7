"""The work of a rank before it is ready: read the run file and the data, load the model, prepare its reference, and
show how far it has come."""

import time
from collections.abc import Callable
from pathlib import Path

from trainctl.protocol.batch.data_statistics import without_end
from trainctl.protocol.batch.settings_rules import fit_warnings
from trainctl.protocol.config import families, run_file
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine import file_digests
from trainctl.protocol.machine.file_digests import FileDigests
from trainctl.protocol.messages import Engine, Sealed
from trainctl.protocol.record.checkpoints import check_node
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.load import load
from trainctl.trainer.checkpoints.chunked_tensors import zstandard
from trainctl.trainer.collective import engines
from trainctl.trainer.common import logs
from trainctl.trainer.common.logs import log
from trainctl.trainer.common.model_files import model_family
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.data.growing_dataset import GrowingDataset, SealedChunks, TrainingData, open_growing
from trainctl.trainer.data.token_cache import Report
from trainctl.trainer.reference import Company, ReferenceSettings, prepare_reference, wants_reference
from trainctl.trainer.step import preflight
from trainctl.trainer.step.rank import Identity

WHERE = "run file"
"""The name of the run file in errors: the user's has the same fields, and nobody is to change this copy."""
BAR_WIDTH = 20
"""Characters of a bar of progress."""
LOG_SECONDS = 10.0
"""Seconds between two lines in the log about the progress of loading."""


def checked_run_file(paths: RunPaths, node: str) -> RunFile:
    """Read the run file, and check all that takes no time. Raises InvalidInputError."""
    config = run_file.on_this_machine(run_file.read(paths.run_file), node)
    run_file.check_paths(config, WHERE, node)
    if config.checkpoint.compression == "zstd":
        zstandard(f"{WHERE}: checkpoint.compression")
    check_node(config.checkpoint.copy_to, WHERE)
    return config


def likely_engine(config: RunFile) -> Engine | None:
    """Return the engine that a run's groups will probably use; None if it has none."""
    return engines.likely(config.group.engine) if len(config.nodes) > 1 else None


def engine_of_run(paths: RunPaths, node: str) -> Engine | None:
    """Return the likely engine of the run whose file is there; None if it can't be read, which `checked_run_file`
    says."""
    try:
        return likely_engine(run_file.on_node(run_file.read(paths.run_file), node))
    except (TrainctlError, OSError):
        return None


class Loader:
    """Loads a rank's data and model, shows the agent and the log how far that has come, and ends if it is asked to."""

    def __init__(self, who: Identity, config: RunFile, paths: RunPaths, status: StatusWriter, control: Control) -> None:
        self._who, self._config, self._paths, self._status, self._control = who, config, paths, status, control
        self._caches = run_file.cache_folder(config, who.node, paths.node_data)

    def look(self) -> None:
        """Look for what ends a wait before there is anything to save. It counts as progress, so that the trainer isn't
        taken for hung."""
        self._status.show("starting")
        self._control.leave_if_asked()

    def data(self) -> TrainingData:
        """Return the run's data, tokenized. Raises InvalidInputError."""
        tokenizing = self._shown(lambda whole: f"tokenizing {whole / 1e6:,.1f} MB")
        dataset: TrainingData
        if self._config.data.growing:
            dataset = self._growing(tokenizing)
            self._warn_of_end(dataset.now.chunks[0])
        else:
            dataset = open_dataset(self._config, self._caches, WHERE, tokenizing)
            self._warn_of_end(dataset)
            _log_dataset(dataset)
        self._control.detail = ""
        return dataset

    def model(self, dataset: TrainingData, *, is_new: bool) -> tuple[Backend, FileDigests]:
        """Return the model, and the digests of its files; its reference is then part of the dataset. Raises
        InvalidInputError."""
        config, folder = self._config, Path(self._config.model.path)
        facts = read_facts(folder, f"{WHERE}: model.path")
        if facts is not None:
            warnings = fit_warnings(config, facts, WHERE)
        else:  # a model that doesn't state its sizes
            warnings = tuple(filter(None, [families.untested(model_family(folder))]))
        for warning in warnings:
            log.warning("%s", warning)
        backend = load(config, config.nodes.get(self._who.node, NodeTable()), WHERE)
        digests = file_digests.model_digests(folder)
        if is_new and self._wants_preflight():
            checked = preflight.preflight(self._who, config, backend, dataset, digests, self.look)
            self._control.preflight = checked
        if wants_reference(config):
            self._prepare_reference(backend, dataset, digests)
        return backend, digests

    def _growing(self, tokenizing: Report) -> GrowingDataset:
        control, config = self._control, self._config

        def seal(data: GrowingDataset) -> None:
            order = data.now.order
            sealed = Sealed(
                run=self._who.run,
                rank=self._who.rank,
                chunks=order.chunks,
                samples=order.samples,
                digest=data.now.chain[-1],
                ended=order.ended,
            )
            logs.sealed(sealed)
            control.seal(sealed)

        def wait_for_first(now: SealedChunks) -> None:
            of = f"{now.following:,} of the first {config.data.chunk_samples:,} samples"
            control.detail = f"waiting for data: {of} in {Path(config.data.path).name}"
            self.look()

        return open_growing(
            config, self._caches, WHERE, tokenizing, wait_for_first, on_sealed=seal, on_failed=control.fail
        )

    def _wants_preflight(self) -> bool:
        """Return whether ranks of a new group have something long to do before they are ready, this one or others."""
        has_record = self._paths.rank_record(self._who.rank).exists()
        is_new_group = len(self._config.nodes) > 1 and not has_record and not run_file.grows(self._config)
        return is_new_group and wants_reference(self._config)

    def _prepare_reference(self, backend: Backend, dataset: TrainingData, digests: FileDigests) -> None:
        assert isinstance(dataset, Dataset), "pairs are whole files"
        settings = ReferenceSettings.of(self._config, self._who.node, self._caches, digests.whole)
        is_alone = len(self._config.nodes) == 1
        company = None if is_alone else Company(self._who.run, self._who.rank, self._control)
        show = self._shown(lambda whole: f"computing the reference of {whole:,} pairs")

        def report(done: int, whole: int) -> None:
            self.look()
            show(done, whole)

        prepare_reference(settings, dataset, backend, report, company)
        self._control.detail = ""

    def _warn_of_end(self, dataset: Dataset) -> None:
        if not dataset.has_end:
            log.warning("%s", without_end(self._config.data.kind))

    def _shown(self, work: Callable[[int], str]) -> Report:
        """Return what shows progress as a bar with an estimate: to the agent, where it counts as a sign of life, and at
        times in the log. `work`: what is done, by how much it is."""
        before, due, begun = -1, time.monotonic() + LOG_SECONDS, time.monotonic()
        first: int | None = None  # what was done before, as by a process that was killed

        def report(done: int, whole: int) -> None:
            nonlocal before, due, first
            if done == before:
                return
            before, first = done, done if first is None else first
            self._status.show("starting")
            self._control.detail = f"{work(whole)} {progress_bar(done, whole, first, time.monotonic() - begun)}"
            if time.monotonic() >= due:
                due = time.monotonic() + LOG_SECONDS
                log.info("%s", self._control.detail)

        return report


def progress_bar(done: int, whole: int, first: int, seconds: float) -> str:
    """Return a bar, the part that is done, and the time left by the pace of what these seconds added to `first`."""
    part = min(1.0, done / max(1, whole))
    filled = int(BAR_WIDTH * part)
    left = seconds * (whole - done) / (done - first) if done > first else None
    estimate = "" if left is None else f", {left:,.0f} s left" if left < 120 else f", {left / 60:,.0f} min left"
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {part:.0%}{estimate}"


def _log_dataset(dataset: Dataset) -> None:
    for name, count in dataset.remarks.items():
        log.warning("left out of the data: %s: %s", name, f"{count:,}")
    for part, samples in ((dataset, "samples"), (dataset.evaluation, "held-out samples")):
        if part is not None and part.left_out:
            why = "they have no token to learn within data.sequence_length, or data.overlong leaves them out"
            log.warning("skipped %s %s: %s", part.left_out, samples, why)
        if part is not None and part.truncated:
            length = "data.sequence_length" if part.encodes_prompts else "data.sequence_length + 1"
            log.warning("truncated %s %s to %s tokens", part.truncated, samples, length)
    if dataset.packs is not None:
        count, packs = len(dataset.packs.members), len(dataset.packs)
        log.info("packed %s samples into %s packs, %.1f each", f"{count:,}", f"{packs:,}", count / packs)
