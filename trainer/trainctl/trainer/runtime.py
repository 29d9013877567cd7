"""A rank's main loop: report ready, carry out plans one after another, and leave."""

import time
from pathlib import Path
from typing import assert_never

import msgspec

from trainctl.protocol.batch.flops import step_flops
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.machine.file_digests import FileDigests
from trainctl.protocol.messages import (
    Answer,
    EvaluationReport,
    Fence,
    Form,
    Formed,
    Generation,
    GroupFailed,
    Leave,
    Ready,
    Report,
    SampleReport,
    StepPlan,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.trainer.checkpoints.checkpointer import CHECKPOINT_FAILURES, Checkpointer, RecordSync
from trainctl.trainer.checkpoints.saver import Saver
from trainctl.trainer.collective.group import Group
from trainctl.trainer.collective.membership import Membership
from trainctl.trainer.collective.shared_buffer import Layout, layout_digest
from trainctl.trainer.collective.standby import Standby
from trainctl.trainer.common import logs
from trainctl.trainer.common.errors import AbandonedError, GroupError, first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.common.model_files import model_family
from trainctl.trainer.control.orders import Broken, Joined, Joining, Order, Orphaned, Signalled
from trainctl.trainer.control.thread import Control
from trainctl.trainer.data.dataset import Look
from trainctl.trainer.loading import likely_engine
from trainctl.trainer.loop import train
from trainctl.trainer.profiling.profiler import Profiler
from trainctl.trainer.step import preflight, side_plans
from trainctl.trainer.step.rank import Rank, copy_state_to_ranks_behind
from trainctl.trainer.step.sampler import SAMPLE_FAILURES, PairTexts, Sampler


class Trainer:
    """A loaded rank; `serve` returns when the process is to end with status 0."""

    def __init__(
        self,
        rank: Rank,
        config: RunFile,
        paths: RunPaths,
        control: Control,
        model_files: FileDigests,
        standby: Standby | None = None,
    ) -> None:
        who, backend = rank.who, rank.backend
        self._rank, self._config, self._control = rank, config, control
        self._backend, self._progress, self._status = backend, rank.progress, rank.status
        facts = read_facts(Path(config.model.path), "run file: model.path")
        rank.observer.flops = step_flops(config.adapter, facts, "run file")
        self._model_files = model_files
        self._saver = Saver(rank, config, paths, model_files.whole)
        copied = paths.checkpoints if config.checkpoint.copy_to else None
        self._metrics = MetricsWriter(paths.rank_record(who.rank), who.node)
        record = RecordSync(paths, self._metrics, rank.progress, lambda: control.is_away)
        control.on_recorded = record.plan
        self.checkpointer = Checkpointer(who.run, who.rank, self._saver, control.send, copied, record.wait)
        self._family = model_family(Path(config.model.path))
        self._sampler = Sampler(config, backend, rank.progress, rank.status)
        self._pair_texts = PairTexts(config, rank.dataset)
        self.profiler = Profiler(rank, paths.profiles)
        control.repeated += [self.checkpointer.state, self.profiler.state]
        self._joined: Generation | None = None  # the generation of the rank's group
        self._is_saved = False  # what a signal had to write
        interface = config.nodes.get(who.node, NodeTable()).interface
        layout = Layout(backend.shapes, layout_digest(backend.shapes))
        self._membership = Membership(
            who.rank, layout, config.group, interface, likely_engine(config), standby=standby, nodes=tuple(config.nodes)
        )

    def resume(self, folder: Path | None, look: Look) -> None:
        """Stand where the checkpoint in `folder` stood, or at the beginning. `look`: what may end the wait for a
        growing file. Raises InvalidInputError if it doesn't fit."""
        self._saver.resume(folder, look)

    def announce(self) -> Ready:
        """Tell the agent what has been loaded; heartbeats repeat it from here on."""
        progress = self._progress
        ready = preflight.ready(
            self._rank.who,
            self._backend,
            self._rank.dataset,
            self._model_files,
            last_step=progress.last_step,
            cursor=progress.cursor,
        )
        self._stand_by()
        self._control.groups.membership = self._membership
        self._control.send(ready)
        self._control.ready = ready
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
                if not isinstance(order, Fence):  # between a fence and the next group, no plan is waited for
                    started = time.perf_counter()
        finally:
            self.checkpointer.wait()
            self._rank.close()
            self._rank.dataset.close()
            self._membership.close()
            self._metrics.close()
            self.profiler.close()
            if is_orderly:  # else the agent should know why soon
                self.checkpointer.wait_for_copy()

    def _act(self, order: Order, started: float) -> bool:
        """Do one order; False if it was the last."""
        match order:
            case StepPlan():
                self._act_on_plan(order, started)
            case Joined(generation=generation, group=group):
                self._take_group(generation, group)
            case Joining():
                self._join(order)
            case Fence(generation=generation):
                log.info("left %s at step %s", generation, f"{self._progress.last_step:,}")
                self._rank.group.close()
                self._status.show("regroup")
            case Leave(reason=reason, checkpoint=checkpoint):
                if checkpoint:
                    self._write_last()
                log.info("leaving: %s", reason)
                return False
            case Signalled(reason=reason):
                if self._trains_alone:
                    self._write_last()
                self._is_saved = True
                log.info("leaving: %s", reason)
                return False
            case Orphaned(seconds=seconds):
                log.warning("the agent has been gone for %.0f s: writing a checkpoint, then exiting", seconds)
                self._write_last()
                log.info("leaving: the agent has been gone for %.0f s", seconds)
                return False
            case Broken(error=error):
                raise error
            case _:
                assert_never(order)
        return True

    def _write_last(self) -> None:
        """Write a checkpoint of the last step, if there is one and its state is not half of another rank's."""
        if self._progress.whole and self._progress.last_step > 0:
            self._status.show("checkpoint")
            self.checkpointer.write_last(self._progress.last_step)

    @property
    def written_bytes(self) -> int | None:
        """Bytes written of the checkpoint under way, for the thread that takes signals; 0 as long as the one that a
        signal causes waits for the end of a micro-batch; None: there is no checkpoint to wait for."""
        written = self.checkpointer.done_bytes
        return 0 if written is None and not self._is_saved and self._trains_alone else written

    @property
    def _trains_alone(self) -> bool:
        """True if no other rank has this one's state."""
        progress = self._progress
        trains = progress.formed is not None and progress.formed == self._joined and progress.whole
        return trains and self._rank.group.is_alone and progress.last_step > 0

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
                copy_state_to_ranks_behind(self._rank, group, form)
            group.formed()
        except (AbandonedError, GroupError) as error:
            group.close()
            if isinstance(error, GroupError):
                self._conclude(form, groups.failed(form.generation, error))
            return
        self._take_group(form.generation, group)
        self._conclude(form, groups.formed(form.generation, joined - begun, time.perf_counter() - joined))
        self._stand_by()

    def _conclude(self, form: Form, outcome: Formed | GroupFailed) -> None:
        logs.concluded(form, outcome)
        self._control.groups.outcome = outcome
        self._control.send(outcome)

    def _take_group(self, generation: Generation, group: Group) -> None:
        self._rank.group.close()
        self._rank.group, self._joined = group, generation
        self._status.show("idle", self._progress.last_step, (generation.term, generation.n))

    def _stand_by(self) -> None:
        """Have reducers ready. One that can't be started now is tried again, and the error reported, when needed."""
        try:
            self._membership.stand_by()
        except GroupError as error:
            log.warning("no standby reducer: %s", error)

    def _act_on_plan(self, plan: StepPlan, started: float) -> None:
        """Carry out a plan, unless it is of another generation or was seen before."""
        progress = self._progress
        if progress.leaving or not plan.generation == progress.formed == self._joined or plan.seq <= progress.last_seq:
            return
        progress.last_seq = plan.seq
        try:
            report = self._run_plan(plan, started)
        except (AbandonedError, GroupError) as error:
            self._backend.device.free_cache()
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

    def _run_plan(self, plan: StepPlan, started: float) -> Report:
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

    def _evaluate(self, plan: StepPlan, started: float) -> EvaluationReport:
        """Evaluate. A tokenizer that fails costs the texts of pairs, not the evaluation."""
        report = side_plans.evaluate(self._rank, plan, started)
        try:
            pairs = tuple(self._pair_texts.described(pair) for pair in report.pairs)
        except SAMPLE_FAILURES as error:
            log.warning("the texts of held-out pairs are missing: %s", first_line(error))
            return report
        return msgspec.structs.replace(report, pairs=pairs)

    def _sample(self, plan: StepPlan, started: float) -> SampleReport:
        """Answer prompts. A tokenizer or a lack of memory that prevents it costs the sample, not the run: the report
        says why."""
        answers: tuple[Answer, ...] = ()
        failure, watch = None, self._rank.observer.begin(started)
        try:
            answers = self._sampler.answers(plan)
        except SAMPLE_FAILURES as error:
            failure = f"sample failed: {first_line(error)}"
        report = side_plans.acknowledge(self._rank, plan, watch, failure)
        return SampleReport(**msgspec.structs.asdict(report), answers=answers)

    def _profile(self, plan: StepPlan, started: float) -> Report:
        """Arm the profiler. A problem costs the profile, not the run: the report says why."""
        watch = self._rank.observer.begin(started)
        self._status.show("profile")
        return side_plans.acknowledge(self._rank, plan, watch, self.profiler.arm(plan))

    def _checkpoint(self, plan: StepPlan, started: float) -> Report:
        """Write a checkpoint. A disk that doesn't take it costs the checkpoint, not the run: the report says why, or a
        later message if it is written in the background."""
        written, failure, watch = None, None, self._rank.observer.begin(started)
        if self._rank.who.rank in plan.writers:
            self._status.show("checkpoint")
            try:
                if self._config.checkpoint.background:
                    self.checkpointer.copy(plan)
                else:
                    written = self.checkpointer.write(plan)
            except CHECKPOINT_FAILURES as error:
                failure = f"checkpoint failed: {first_line(error)}"
        report = side_plans.acknowledge(self._rank, plan, watch, failure)
        return msgspec.structs.replace(report, checkpoint=written)
