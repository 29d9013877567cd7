"""A rank's main loop: load, report ready, carry out plans one after another, and leave."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import assert_never

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.batch.data_statistics import without_end
from trainctl.protocol.batch.flops import step_flops
from trainctl.protocol.config import families, run_file, run_tables
from trainctl.protocol.config.fit_warnings import fit_warnings
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.machine import file_digests
from trainctl.protocol.machine.file_digests import FileDigests
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.load import load
from trainctl.trainer.checkpoints import copies
from trainctl.trainer.checkpoints.checkpointer import CHECKPOINT_FAILURES, Checkpointer
from trainctl.trainer.checkpoints.chunked_tensors import zstandard
from trainctl.trainer.checkpoints.copies import Copies
from trainctl.trainer.checkpoints.record_sync import RecordSync
from trainctl.trainer.checkpoints.saver import Saver
from trainctl.trainer.collective import engines
from trainctl.trainer.collective.group import Group
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout, layout_digest
from trainctl.trainer.collective.standby import Standby
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import AbandonedError, GroupError, first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.common.model_files import model_family
from trainctl.trainer.control.inbox import Broken, Joined, Joining, Order, Orphaned, Signalled
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.data.growing_dataset import GrowingDataset, SealedChunks, open_growing
from trainctl.trainer.data.token_cache import Report
from trainctl.trainer.data.training_data import Look, TrainingData
from trainctl.trainer.loop import train
from trainctl.trainer.profiling.profiler import Profiler
from trainctl.trainer.references.preparation import Company, ReferenceSettings, prepare_reference, wants_reference
from trainctl.trainer.step import preflight, side_plans, state_transfer
from trainctl.trainer.step.observer import Ranges
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank, Settings
from trainctl.trainer.step.sampler import SAMPLE_FAILURES, PairTexts, Sampler

BAR_WIDTH = 20
"""Characters of a bar of progress."""
LOG_SECONDS = 10.0
"""Seconds between two lines in the log about the progress of loading."""


class Trainer:
    """A loaded rank. Its parts are made by `load_trainer`; `serve` returns when the process is to end with status 0."""

    def __init__(
        self, who: Identity, config: run_tables.RunFile, paths: RunPaths, backend: Backend, dataset: TrainingData,
        progress: Progress, status: StatusWriter, control: Control, model_files: FileDigests,
        standby: Standby | None = None,
    ) -> None:  # fmt: skip
        self._who, self._config, self._backend, self._dataset = who, config, backend, dataset
        self._progress, self._status, self._control = progress, status, control
        self._layout = Layout(backend.shapes, layout_digest(backend.shapes))
        settings = Settings.of(config, who.node)
        self._rank = Rank(who, settings, backend, dataset, progress, status, control.send)
        facts = read_facts(Path(config.model.path), "run file: model.path")
        self._rank.observer.flops = step_flops(config.adapter, facts, "run file")
        self._model_files = model_files
        self._saver = Saver(
            who.run, config, paths, backend, dataset, progress, self._rank.loss_scale, self._layout.digest,
            self._model_files.whole, who.node,
        )  # fmt: skip
        self._copies = Copies(who.run, who.rank, paths.checkpoints, config.checkpoint, control.send)
        self._metrics = MetricsWriter(paths.rank_record(who.rank), who.node)
        record = RecordSync(paths, self._metrics, progress, lambda: control.is_away)
        control.on_recorded = record.plan
        self.checkpointer = Checkpointer(who.run, who.rank, self._saver, control.send, self._copies, record)
        control.checkpoint_state = self.checkpointer.state
        self._family = model_family(Path(config.model.path))
        self._sampler = Sampler(config, backend, progress, status)
        self._pair_texts = PairTexts(config, dataset)
        self.profiler = Profiler(who.run, who.rank, paths.profiles, backend, control.send, self._show_phases)
        control.profile_state = self.profiler.state
        self._joined: m.Generation | None = None  # the generation of the rank's group
        self._is_saved = False  # what a signal had to write
        interface = config.nodes.get(who.node, run_tables.NodeTable()).interface
        self._membership = Membership(
            who.rank, self._layout, config.group, interface, _likely(config), standby, tuple(config.nodes)
        )

    def resume(self, folder: Path | None) -> None:
        """Stand where the checkpoint in `folder` stood, or at the beginning. Raises InvalidInputError if it doesn't
        fit."""
        self._saver.resume(folder, _ended_by(self._status, self._control))

    def announce(self) -> m.Ready:
        """Tell the agent what has been loaded; heartbeats repeat it from here on."""
        progress = self._progress
        ready = preflight.ready(
            self._who, self._backend, self._dataset, self._model_files,
            last_step=progress.last_step, cursor=progress.cursor,
        )  # fmt: skip
        self._stand_by()
        self._control.groups.membership = self._membership
        self._control.send(ready)
        self._control.ready = ready
        self._copies.resume()
        logs.ready(ready)
        return ready

    def serve(self) -> None:
        """Act on orders until one says to leave, or until the agent has been away for too long."""
        started, is_orderly = time.perf_counter(), False
        self._status.show("idle", self._progress.last_step)
        try:
            while True:
                order = self._control.orders.get()
                if not self._act(order, started):
                    is_orderly = True
                    return
                if not isinstance(order, m.Fence):  # the time in which the group has no generation is no one's wait
                    started = time.perf_counter()
        finally:
            self.checkpointer.close()
            self._rank.close()
            self._dataset.close()
            self._membership.close()
            self._metrics.close()
            self.profiler.close()
            if is_orderly:  # else the agent should know why soon
                self._copies.close()

    def _act(self, order: Order, started: float) -> bool:
        """Do one order; False if it was the last."""
        match order:
            case m.StepPlan():
                self._act_on_plan(order, started)
            case Joined(generation=generation, group=group):
                self._take_group(generation, group)
            case Joining():
                self._join(order)
            case m.Fence(generation=generation):
                log.info("left %s at step %s", generation, f"{self._progress.last_step:,}")
                self._rank.group.close()
                self._status.show("regroup")
            case m.Leave(reason=reason):
                log.info("leaving: %s", reason)
                return False
            case Signalled(reason=reason):
                self._write_if_alone()
                self._is_saved = True
                log.info("leaving: %s", reason)
                return False
            case Orphaned(seconds=seconds):
                log.warning("the agent has been gone for %.0f s: writing a checkpoint, then exiting", seconds)
                self.checkpointer.write_last(self._progress.last_step)
                log.info("leaving: the agent has been gone for %.0f s", seconds)
                return False
            case Broken(error=error):
                raise error
            case _:
                assert_never(order)
        return True

    @property
    def written_bytes(self) -> int | None:
        """For the thread that takes signals: bytes written of the checkpoint under way; 0 as long as the one that a
        signal causes waits for the end of a micro-batch; None: there is no checkpoint to wait for."""
        written = self.checkpointer.done_bytes
        return 0 if written is None and not self._is_saved and self._trains_alone else written

    @property
    def _trains_alone(self) -> bool:
        """Whether no other rank has this one's state."""
        progress = self._progress
        trains = progress.formed is not None and progress.formed == self._joined and progress.whole
        return trains and self._rank.group.is_alone and progress.last_step > 0

    def _write_if_alone(self) -> None:
        """A signal ends this rank."""
        if self._trains_alone:
            self._status.show("checkpoint")
            self.checkpointer.write_last(self._progress.last_step)

    def _join(self, order: Joining) -> None:
        """Complete what the control thread has begun, and take or give state; then say how it went."""
        form, group, groups = order.form, order.group, self._control.groups
        self._status.show("regroup")
        begun = time.perf_counter()
        try:
            self._progress.check(form.generation)
            group.complete()
            joined = time.perf_counter()
            if form.source is not None:
                scale = self._rank.loss_scale
                state_transfer.level(group, form, self._who.rank, self._backend, scale, self._progress)
            group.formed()
        except (AbandonedError, GroupError) as error:
            group.close()
            if isinstance(error, GroupError):
                self._conclude(form, groups.failed(form.generation, error))
            return
        self._take_group(form.generation, group)
        self._conclude(form, groups.formed(form.generation, joined - begun, time.perf_counter() - joined))
        self._stand_by()

    def _conclude(self, form: m.Form, outcome: m.Formed | m.GroupFailed) -> None:
        logs.concluded(form, outcome)
        self._control.groups.outcome = outcome
        self._control.send(outcome)

    def _take_group(self, generation: m.Generation, group: Group) -> None:
        self._rank.group.close()
        self._rank.group, self._joined = group, generation
        self._status.show("idle", self._progress.last_step, (generation.term, generation.n))

    def _stand_by(self) -> None:
        """A process that cannot be started now is tried again when it is needed, and the error is reported then."""
        try:
            self._membership.stand_by()
        except GroupError as error:
            log.warning("no standby reducer: %s", error)

    def _act_on_plan(self, plan: m.StepPlan, started: float) -> None:
        """A plan of another generation, or one seen before, is not acted on."""
        progress = self._progress
        if progress.leaving or not plan.generation == progress.formed == self._joined or plan.seq <= progress.last_seq:
            return
        progress.last_seq = plan.seq
        try:
            report = self._run_plan(plan, started)
        except (AbandonedError, GroupError) as error:
            self._backend.discard()
            if not progress.leaving:  # else a signal may still want a checkpoint of the last step
                self._joined = None  # the next plan of this generation, which may be here already, follows nothing
            self._status.show("regroup")
            if isinstance(error, GroupError):
                log.warning("step %s: the sum failed: %s", f"{plan.step:,}", first_line(error))
                self._control.send(self._control.groups.failed(plan.generation, error))
            return
        self._control.send(report)
        self.checkpointer.begin()  # not before its plan is reported
        logs.reported(report)
        if plan.kind == "train":
            self._metrics.append(report)
            self.profiler.step_ended(plan.step)
        self._status.show("idle")

    def _run_plan(self, plan: m.StepPlan, started: float) -> m.Report:
        self.profiler.before(plan.kind)
        match plan.kind:
            case "train":
                with self.profiler.step(plan.step):
                    return train(self._rank, plan, started)
            case "evaluate":
                return self._evaluate(plan, started)
            case "checkpoint":
                return self._checkpoint(plan, started)
            case "sync":
                return side_plans.synchronize(self._rank, plan, started)
            case "measure":
                return side_plans.measure(self._rank, plan, started)
            case "probe":
                return side_plans.probe(self._rank, plan, started, self._family)
            case "sample":
                return self._sample(plan, started)
            case "defragment":
                return side_plans.defragment(self._rank, plan, started)
            case "profile":
                return self._profile(plan, started)

    def _evaluate(self, plan: m.StepPlan, started: float) -> m.EvaluationReport:
        """A tokenizer that fails costs the texts of pairs, not the evaluation."""
        report = side_plans.evaluate(self._rank, plan, started)
        try:
            pairs = tuple(self._pair_texts.described(pair) for pair in report.pairs)
        except SAMPLE_FAILURES as error:
            log.warning("the texts of held-out pairs are missing: %s", first_line(error))
            return report
        return msgspec.structs.replace(report, pairs=pairs)

    def _sample(self, plan: m.StepPlan, started: float) -> m.SampleReport:
        """A tokenizer or a lack of memory that prevents it costs the sample, not the run: the report says why."""
        answers: tuple[m.Answer, ...] = ()
        failure = None
        try:
            answers = self._sampler.answers(plan)
        except SAMPLE_FAILURES as error:
            failure = f"sample failed: {first_line(error)}"
        report = side_plans.acknowledge(self._rank, plan, started, failure)
        return m.SampleReport(**msgspec.structs.asdict(report), answers=answers)

    def _profile(self, plan: m.StepPlan, started: float) -> m.Report:
        """What prevents a profile costs the profile, not the run: the report says why."""
        self._status.show("profile")
        problem = self.profiler.arm(plan)
        return side_plans.acknowledge(self._rank, plan, started, problem)

    def _show_phases(self, ranges: Ranges | None) -> None:
        self._rank.observer.ranges = ranges

    def _checkpoint(self, plan: m.StepPlan, started: float) -> m.Report:
        """A disk that doesn't take it costs the checkpoint, not the run: the report says why, or a later message if it
        is written in the background."""
        written, failure = None, None
        if self._who.rank in plan.writers:
            self._status.show("checkpoint")
            try:
                if self._config.checkpoint.background:
                    self.checkpointer.copy(plan)
                else:
                    written = self.checkpointer.write(plan)
            except CHECKPOINT_FAILURES as error:
                failure = f"checkpoint failed: {first_line(error)}"
        report = side_plans.acknowledge(self._rank, plan, started, failure)
        return msgspec.structs.replace(report, checkpoint=written)


WHERE = "run file"
"""The name of the run file in errors: the user's has the same fields, and nobody is to change this copy."""


def checked_run_file(paths: RunPaths, node: str) -> run_tables.RunFile:
    """Read the run file, and check all that takes no time. Raises InvalidInputError."""
    config = run_file.on_this_machine(run_file.read(paths.run_file), node)
    run_file.check_paths(config, WHERE, node)
    if config.checkpoint.compression == "zstd":
        zstandard(f"{WHERE}: checkpoint.compression")
    copies.check(config.checkpoint, WHERE)
    return config


def load_trainer(
    who: Identity, paths: RunPaths, progress: Progress, status: StatusWriter, control: Control,
    standby: Standby | None = None, *, is_new: bool = True,
) -> Trainer:  # fmt: skip
    """Read the run file, the data and the model. `is_new`: from no checkpoint. Raises InvalidInputError naming what is
    wrong and where."""
    where, config = WHERE, checked_run_file(paths, who.node)
    control.orphan_seconds = config.run.orphan_seconds
    caches = run_file.cache_folder(config, who.node, paths.node_data)
    dataset: TrainingData
    if config.data.growing:
        dataset = _open_growing(who, config, caches, where, progress, status, control)
    else:
        dataset = open_dataset(config, caches, where, _tokenizing(status, control))
        _log_dataset(dataset, config)
    control.detail = ""
    _warn_of_fit(config, where)
    backend = load(config, config.nodes.get(who.node, run_tables.NodeTable()), where)
    model_files = file_digests.model_digests(Path(config.model.path))
    if is_new and _wants_preflight(config, paths, who.rank):
        look = _ended_by(status, control)
        control.take_preflight(preflight.preflight(who, config, backend, dataset, model_files, look))
    if wants_reference(config):
        assert isinstance(dataset, Dataset), "pairs are whole files"
        settings = ReferenceSettings.of(config, who.node, caches, model_files.whole)
        company = Company(who.run, who.rank, control) if len(config.nodes) > 1 else None
        prepare_reference(settings, dataset, backend, _computing_reference(status, control, progress), company)
        control.detail = ""
    return Trainer(who, config, paths, backend, dataset, progress, status, control, model_files, standby)


def _wants_preflight(config: run_tables.RunFile, paths: RunPaths, rank: int) -> bool:
    """Return whether ranks of a new group have something long to do before they are ready, this one or others."""
    is_new = len(config.nodes) > 1 and not paths.rank_record(rank).exists() and not run_file.grows(config)
    return is_new and wants_reference(config)


def _warn_of_fit(config: run_tables.RunFile, where: str) -> None:
    """A model that doesn't state its sizes is loaded without."""
    model = Path(config.model.path)
    facts = read_facts(model, f"{where}: model.path")
    if facts is not None:
        warnings = fit_warnings(config, facts, where)
    else:
        warnings = tuple(filter(None, [families.untested(model_family(model))]))
    for line in warnings:
        log.warning("%s", line)


def _open_growing(
    who: Identity, config: run_tables.RunFile, caches: Path, where: str, progress: Progress, status: StatusWriter,
    control: Control,
) -> GrowingDataset:  # fmt: skip
    def told(data: GrowingDataset) -> None:
        order = data.now.order
        sealed = m.Sealed(
            run=who.run, rank=who.rank, chunks=order.chunks, samples=order.samples, digest=data.now.chain[-1],
            ended=order.ended,
        )  # fmt: skip
        logs.sealed(sealed)
        control.seal(sealed)

    def first(now: SealedChunks) -> None:
        of = f"{now.following:,} of the first {config.data.chunk_samples:,} samples"
        control.detail = f"waiting for data: {of} in {Path(config.data.path).name}"

    look = _ended_by(status, control)
    report = _tokenizing(status, control)
    growing = open_growing(config, caches, where, report, look, first, told=told, failed=control.fail)
    _log_end(growing.now.chunks[0], config)
    return growing


def _ended_by(status: StatusWriter, control: Control) -> Look:
    """What a wait for data looks for before there is anything to save. It counts as progress, so that the trainer isn't
    taken for hung."""

    def look() -> None:
        status.show("starting")
        control.leave_if_asked()

    return look


def _log_dataset(dataset: Dataset, config: run_tables.RunFile) -> None:
    _log_end(dataset, config)
    for name, count in dataset.remarks.items():
        log.warning("left out of the data: %s: %s", name, f"{count:,}")
    _log_lost(dataset, "samples")
    if dataset.evaluation is not None:
        _log_lost(dataset.evaluation, "held-out samples")
    if dataset.packs is not None:
        samples, packs = len(dataset.packs.members), len(dataset.packs)
        log.info("packed %s samples into %s packs, %.1f each", f"{samples:,}", f"{packs:,}", samples / packs)


def _log_end(dataset: Dataset, config: run_tables.RunFile) -> None:
    if not dataset.has_end:
        log.warning("%s", without_end(config.data.kind))


def _log_lost(dataset: Dataset, samples: str) -> None:
    if dataset.left_out:
        why = "they have no token to learn within data.sequence_length, or data.overlong leaves them out"
        log.warning("skipped %s %s: %s", dataset.left_out, samples, why)
    if dataset.truncated:
        length = "data.sequence_length" if dataset.encodes_prompts else "data.sequence_length + 1"
        log.warning("truncated %s %s to %s tokens", dataset.truncated, samples, length)


def _tokenizing(status: StatusWriter, control: Control) -> Report:
    """Shows how far the data are tokenized."""
    return _shown(status, control, lambda whole: f"tokenizing {whole / 1e6:,.1f} MB")


def _computing_reference(status: StatusWriter, control: Control, progress: Progress) -> Report:
    """Shows how far the reference's log-probabilities are computed, and looks whether they are still wanted."""
    look = _ended_by(status, control)
    show = _shown(status, control, lambda whole: f"computing the reference of {whole:,} pairs")

    def report(done: int, whole: int) -> None:
        look()
        show(done, whole)

    return report


def _shown(status: StatusWriter, control: Control, work: Callable[[int], str]) -> Report:
    """Show progress as a bar with an estimate: to the agent, where it counts as a sign of life, and at times in the
    log. `work`: what is done, by how much it is."""
    before, due, begun = -1, time.monotonic() + LOG_SECONDS, time.monotonic()
    first: int | None = None  # what was done before, as by a process that was killed

    def report(done: int, whole: int) -> None:
        nonlocal before, due, first
        if done == before:
            return
        before, first = done, done if first is None else first
        status.show("starting")
        control.detail = f"{work(whole)} {progress_bar(done, whole, first, time.monotonic() - begun)}"
        if time.monotonic() >= due:
            due = time.monotonic() + LOG_SECONDS
            log.info("%s", control.detail)

    return report


def progress_bar(done: int, whole: int, first: int, seconds: float) -> str:
    """Return a bar, the part that is done, and the time left by the pace of what these seconds added to `first`."""
    part = min(1.0, done / max(1, whole))
    filled = int(BAR_WIDTH * part)
    left = seconds * (whole - done) / (done - first) if done > first else None
    estimate = "" if left is None else f", {left:,.0f} s left" if left < 120 else f", {left / 60:,.0f} min left"
    return f"[{'#' * filled}{'-' * (BAR_WIDTH - filled)}] {part:.0%}{estimate}"


def _likely(config: run_tables.RunFile) -> m.Engine | None:
    return engines.likely(config.group.engine) if len(config.nodes) > 1 else None


def likely_engine(paths: RunPaths, node: str) -> m.Engine | None:
    """The engine that a run's groups will probably use; None if it has none, or its file can't be read, which
    `load_trainer` tells."""
    try:
        return _likely(run_file.on_node(run_file.read(paths.run_file), node))
    except (TrainctlError, OSError):
        return None


Failures = (TrainctlError, OSError, RuntimeError, MemoryError)
"""Errors that end a trainer with one line: ours, the system's and the array libraries'."""
