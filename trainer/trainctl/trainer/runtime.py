"""One rank's life: load, say so, act on plans one after another, and leave."""

import sys
import time
from pathlib import Path
from typing import assert_never

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol import runfile
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.paths import RunPaths
from trainctl.protocol.statuspage import StatusWriter
from trainctl.trainer import checkpoint, digest
from trainctl.trainer.backend import Backend, first_line, load
from trainctl.trainer.control import Broken, Control, Joined, Order, Orphaned
from trainctl.trainer.dataset import Dataset, open_dataset
from trainctl.trainer.ledger import AbandonedError, Ledger
from trainctl.trainer.metrics import MetricsWriter
from trainctl.trainer.step import Executor, Identity, Settings


class Trainer:
    """A loaded rank. Its parts are made by `load_trainer`; `serve` returns when the process is to end with status 0."""

    def __init__(
        self,
        who: Identity,
        config: runfile.RunFile,
        paths: RunPaths,
        backend: Backend,
        dataset: Dataset,
        ledger: Ledger,
        status: StatusWriter,
        control: Control,
    ) -> None:
        self._who, self._config, self._paths = who, config, paths
        self._backend, self._dataset, self._ledger = backend, dataset, ledger
        self._status, self._control = status, control
        self._layout = digest.layout_digest(backend.shapes)
        settings = Settings(config.run.seed, config.model.dtype, config.optimizer.clip_norm)
        self._executor = Executor(who, settings, backend, dataset, ledger, status, control.send)
        self._metrics = MetricsWriter(paths.rank_record(who.rank), who.node)

    def resume(self, folder: Path | None) -> None:
        """Stand where the checkpoint in `folder` stood, or at the beginning; then clear away what writers that died
        left. Raises InvalidInputError if it doesn't fit."""
        if folder is None:
            self._ledger.load(0, 0)
        else:
            self._take_up(folder)
        checkpoint.tidy(self._paths.checkpoints)  # not earlier: `folder` may be one that has to be put back

    def _take_up(self, folder: Path) -> None:
        found = checkpoint.read(folder)
        checkpoint.check_fits(
            found.loop,
            seed=self._config.run.seed,
            samples=self._dataset.samples,
            layout_digest=self._layout,
            data_digest=self._dataset.digest,
            where=str(folder),
        )
        self._backend.import_state(found.state)
        self._executor.loss_scale.value = found.loop.loss_scale
        self._executor.loss_scale.good_steps = found.loop.loss_scale_good_steps
        self._ledger.load(found.loop.step, found.loop.cursor)

    def announce(self, pid: int) -> m.Ready:
        """Tell the agent what has been loaded; heartbeats repeat it from here on."""
        ready = m.Ready(
            run=self._who.run,
            rank=self._who.rank,
            pid=pid,
            backend=self._backend.name,
            device=self._backend.device,
            parameters=sum(_size(shape) for shape in self._backend.shapes.values()),
            samples=self._dataset.samples,
            held_out=self._dataset.held_out,
            mean_weight=self._dataset.mean_weight,
            layout_digest=self._layout,
            model_digest=digest.model_digest(Path(self._config.model.path)),
            data_digest=self._dataset.digest,
            last_step=self._ledger.last_step,
            cursor=self._ledger.cursor,
            memory_cap_bytes=self._backend.memory().cap_bytes,
        )
        self._control.send(ready)
        self._control.ready = ready
        return ready

    def serve(self) -> None:
        """Act on orders until told to leave, or until the agent has been away for too long."""
        started = time.perf_counter()
        self._status.show("idle", self._ledger.last_step)
        try:
            while True:
                order = self._control.orders.get()
                if not self._act(order, started):
                    return
                if not isinstance(order, m.Fence):  # the time in which the group has no generation is nobody's wait
                    started = time.perf_counter()
        finally:
            self._metrics.close()

    def _act(self, order: Order, started: float) -> bool:
        """Do one order; False if it was the last."""
        match order:
            case m.StepPlan():
                self._act_on_plan(order, started)
            case Joined(generation=generation, group=group):
                self._executor.group = group
                self._status.show("idle", generation=(generation.term, generation.n))
            case m.Fence():
                self._status.show("regroup")
            case m.Leave(reason=reason):
                _say(f"leaving: {reason}")
                return False
            case Orphaned(seconds=seconds):
                _say(f"the agent has been away for {seconds:.0f} s: writing a checkpoint and leaving")
                self._write_checkpoint()
                return False
            case Broken(error=error):
                raise error
            case _:
                assert_never(order)
        return True

    def _act_on_plan(self, plan: m.StepPlan, started: float) -> None:
        """A plan of another generation, or one seen before, is not acted on."""
        if plan.generation != self._ledger.formed or plan.seq <= self._ledger.last_seq:
            return
        self._ledger.last_seq = plan.seq
        try:
            report = self._run_plan(plan, started)
        except AbandonedError:
            self._backend.discard()
            self._status.show("regroup")
            return
        self._control.send(report)
        if plan.kind == "train":
            self._metrics.append(report)
        self._status.show("idle")

    def _run_plan(self, plan: m.StepPlan, started: float) -> m.Report:
        match plan.kind:
            case "train":
                return self._executor.train(plan, started)
            case "evaluate":
                return self._executor.evaluate(plan, started)
            case "checkpoint":
                return self._checkpoint(plan, started)

    def _checkpoint(self, plan: m.StepPlan, started: float) -> m.Report:
        """A disk that doesn't take it costs the checkpoint, not the run: the report says why."""
        if self._who.rank not in plan.writers:
            return self._executor.written(plan, started, None)
        try:
            written = self._write_checkpoint()
        except OSError as error:
            return self._executor.written(plan, started, f"checkpoint failed: {first_line(error)}")
        report = self._executor.written(plan, started, None)
        return msgspec.structs.replace(report, checkpoint=written)

    def _write_checkpoint(self) -> m.CheckpointInfo:
        """Of the last committed step; older ones beyond keep_last go. Raises OSError."""
        begun = time.perf_counter()
        self._status.show("checkpoint")
        state = self._backend.export_state()
        folder = self._paths.checkpoint(self._ledger.last_step)
        model = Path(self._config.model.path)
        manifest = checkpoint.write(folder, self._who.run, self._loop_state(state.updates), state, model)
        checkpoint.prune(self._paths.checkpoints, self._config.checkpoint.keep_last, folder)
        spent = time.perf_counter() - begun
        return m.CheckpointInfo(str(folder), self._ledger.last_step, manifest.size_bytes, spent)

    def _loop_state(self, updates: int) -> checkpoint.LoopState:
        scale = self._executor.loss_scale
        return checkpoint.LoopState(
            step=self._ledger.last_step,
            cursor=self._ledger.cursor,
            updates=updates,
            loss_scale=scale.value,
            loss_scale_good_steps=scale.good_steps,
            seed=self._config.run.seed,
            samples=self._dataset.samples,
            layout_digest=self._layout,
            data_digest=self._dataset.digest,
        )


def load_trainer(who: Identity, paths: RunPaths, ledger: Ledger, status: StatusWriter, control: Control) -> Trainer:
    """Read the run file, the data and the model. Raises InvalidInputError naming what is wrong and where."""
    where = str(paths.run_file)
    config = runfile.read(paths.run_file)
    control.orphan_seconds = config.run.orphan_seconds
    runfile.check_paths(config, where)
    dataset = open_dataset(config, paths.node_data, where)
    if dataset.left_out:
        _say(f"{dataset.left_out} samples have no counted target within data.sequence_length and are left out")
    backend = load(config, config.nodes.get(who.node, runfile.NodeTable()), where)
    return Trainer(who, config, paths, backend, dataset, ledger, status, control)


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


Failures = (TrainctlError, OSError, RuntimeError, MemoryError)
"""What ends a trainer with one line: ours, the system's and the array libraries'."""
