"""Between a rank and its checkpoint files: copies the state of the last committed step in memory, writes the copy by
files.py, and loads a checkpoint at the start. checkpointer.py says when."""

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.messages import CheckpointInfo, Generation, Report
from trainctl.protocol.messages.events import RunBranched
from trainctl.protocol.record.checkpoints import (
    CheckpointMetadata,
    Environment,
    Lineage,
    Manifest,
    ParentCheckpoint,
    Performance,
    best_checkpoint,
    read_manifest,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.backends.backend import Backend, SlotName, State
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.checkpoints import files
from trainctl.trainer.collective.shared_buffer import layout_digest
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.data.dataset import Look, Seen
from trainctl.trainer.step.rank import Rank

FIRST_EVENTS = 50
"""Number of a record's first events among which a branch's own is."""


class WriteMeter:
    """The progress of a write in bytes; read from any thread."""

    def __init__(self, step: int, total_bytes: int) -> None:
        self.step, self.total_bytes, self.done_bytes = step, total_bytes, 0

    def __call__(self, count: int) -> None:
        self.done_bytes = min(self.total_bytes, self.done_bytes + count)


@dataclass(frozen=True)
class Copied:
    """The loop's whole state of one step, in main memory."""

    loop: files.LoopState
    state: State
    report: Report | None  # of the newest step
    generation: Generation | None  # that committed the step
    loop_seconds: float  # time that the copy took
    version: int = 0  # of the state, as Progress counts them

    @property
    def bytes(self) -> int:
        parts = [self.state.weights, self.state.constants, *self.state.slots.values()]
        return sum(array.nbytes for part in parts for array in part.values())

    def meter(self) -> WriteMeter:
        """Return a meter for its write: each byte is written and read back."""
        return WriteMeter(self.loop.step, 2 * self.bytes)


class Saver:
    """Moves the loop's whole state to and from folders of a run directory."""

    def __init__(self, rank: Rank, config: RunFile, paths: RunPaths, model_digest: str) -> None:
        self._rank, self._config, self._paths = rank, config, paths
        self._backend, self._progress = rank.backend, rank.progress
        self._layout_digest = layout_digest(rank.backend.shapes)
        self._base_digest = files.base_digest(model_digest, rank.backend.recipe.adapter)
        self._model = Path(config.model.path)
        self._host_copy = HostCopy(rank.backend)
        self._resumed_from: int | None = None
        self._parent: ParentCheckpoint | None = None  # by the checkpoint that was loaded
        self._environment = Environment(
            node=rank.who.node,
            program=installed_version("trainctl") or "",
            python=platform.python_version(),
            library=f"{rank.backend.name} {installed_version(rank.backend.name) or ''}".strip(),
            device=rank.backend.device.name,
            system=f"{platform.system()} {platform.machine()}",
        )

    def resume(self, folder: Path | None, look: Look = lambda: None) -> None:
        """Stand where the checkpoint in `folder` stood, or at the beginning; then clear away what writers that died
        left. `look`: what may end the wait for a growing file. Raises InvalidInputError if it doesn't fit."""
        if folder is None:
            self._progress.load(0, 0)
        else:
            self._take_up(folder, look)
        files.tidy(self._paths.checkpoints)  # not earlier: `folder` may be one that has to be put back

    def copy(self) -> Copied:
        """Return a copy of the last committed step, valid until the next call. Raises MemoryError."""
        begun, progress = time.perf_counter(), self._progress
        state = self._host_copy.take()
        loop = self._loop_state(progress.cursor, state.updates)
        seconds = time.perf_counter() - begun
        return Copied(loop, state, progress.newest_report, progress.committed_in, seconds, progress.version)

    @property
    def version(self) -> int:
        """Version of the state that a copy would hold now."""
        return self._progress.version

    def write_copy(
        self, copied: Copied, meter: WriteMeter, before_name: Callable[[], None] = lambda: None
    ) -> CheckpointInfo:
        """Write a copy, on any thread. `before_name` is called once all but the folder's final name is on the disk.
        Once it has been read back, older ones go that nothing keeps; what prevents that costs no checkpoint. Raises
        OSError, and InvalidInputError without the library that compresses."""
        begun, loop = time.perf_counter(), copied.loop
        folder, lora = self._paths.checkpoint(loop.step), self._backend.recipe.adapter
        about = files.About(
            compute=self._backend.compute,
            adapter=lora.peft_config(self._model) if lora else None,
            metadata=self._metadata(copied),
            compression=self._config.checkpoint.compression,
            meter=meter,
            before_name=before_name,
        )
        manifest = files.write(folder, self._rank.who.run, loop, copied.state, self._model, about)
        kept, problem = self._prune(folder)
        return CheckpointInfo(
            path=str(folder),
            step=loop.step,
            size_bytes=manifest.size_bytes,
            loop_seconds=copied.loop_seconds,
            write_seconds=time.perf_counter() - begun,
            kept=kept,
            unpruned=problem,
        )

    def write(self, before_name: Callable[[], None] = lambda: None) -> CheckpointInfo:
        """Copy and write at once; training waits. Raises as `write_copy`."""
        begun, copied = time.perf_counter(), self.copy()
        try:
            info = self.write_copy(copied, copied.meter(), before_name)
        finally:
            del copied
            self._host_copy.release()
        return msgspec.structs.replace(info, loop_seconds=time.perf_counter() - begun)

    def _prune(self, newest: Path) -> tuple[tuple[int, ...], str]:
        """Return the steps that stay, if they can be read, and why older checkpoints couldn't be removed. The newest
        one stays, and no other goes because of it: its own evaluation may still come."""
        table, problem = self._config.checkpoint, ""
        try:
            best = best_checkpoint(self._paths, files.step_of(newest)) if table.keep_best else None
            kept = [newest, *([best] if best else [])]
            files.prune(self._paths.checkpoints, table.keep_last, kept, table.keep_every)
        except Exception as error:  # noqa: BLE001  the checkpoint is complete, whatever its neighbours do
            problem = first_line(error)
            log.warning("older checkpoints couldn't be removed: %s", problem)
        try:
            return files.kept_steps(self._paths.checkpoints), problem
        except OSError as error:
            return (), problem or first_line(error)

    def _metadata(self, copied: Copied) -> CheckpointMetadata:
        run, step, report = self._rank.who.run, copied.loop.step, copied.report
        evaluation, parent = read_record(self._paths, run, step)
        lineage = Lineage(
            run=run, resumed_from=self._resumed_from, generation=copied.generation, parent=parent or self._parent
        )
        done = Performance(
            eval_loss=evaluation.loss if evaluation else None, eval_step=evaluation.step if evaluation else None
        )
        if report is not None and report.step == step and report.weight > 0:
            done = msgspec.structs.replace(
                done,
                loss=report.loss_sum / report.weight,
                step_seconds=report.step_seconds,
                tokens_per_second=report.tokens / report.step_seconds if report.step_seconds > 0 else None,
            )
        return CheckpointMetadata(
            recipe=recipe_of(self._config), performance=done, environment=self._environment, lineage=lineage
        )

    def _take_up(self, folder: Path, look: Look) -> None:
        checkpoint = files.read(folder)
        loop = checkpoint.loop
        self._rank.dataset.check_seen(Seen(loop.samples, loop.data_digest, loop.chunks), loop.cursor, look)
        own = self._loop_state(loop.cursor, 0)
        files.check_fits(loop, own, str(folder), self._model, self._backend.recipe.adapter)
        self._backend.import_state(checkpoint.state)
        manifest, scale = read_manifest(folder), self._rank.loss_scale
        # Other types than float16 keep a factor of one.
        stored = manifest.compute.dtype if manifest.compute is not None else None
        if self._config.model.computed == "float16" and stored in (None, "float16"):
            scale.value, scale.good_steps = loop.loss_scale, loop.loss_scale_good_steps
        self._progress.load(loop.step, loop.cursor)
        self._resumed_from = loop.step
        self._parent = parent_by(manifest, self._rank.who.run)

    def _loop_state(self, cursor: int, updates: int) -> files.LoopState:
        seen, scale = self._rank.dataset.seen(cursor), self._rank.loss_scale
        return files.LoopState(
            step=self._progress.last_step,
            cursor=cursor,
            updates=updates,
            loss_scale=scale.value,
            loss_scale_good_steps=scale.good_steps,
            seed=self._config.run.seed,
            samples=seen.samples,
            layout_digest=self._layout_digest,
            data_digest=seen.digest,
            chunks=seen.chunks,
            base_digest=self._base_digest,
        )


def read_record(paths: RunPaths, run: str, step: int) -> tuple[Evaluation | None, ParentCheckpoint | None]:
    """Return the newest evaluation up to a step and what the run branched off, by this node's copy of the record; None
    for what it doesn't have, or without a record."""
    try:
        with RecordReader(paths) as record:
            evaluations = [evaluation for evaluation in record.evaluations() if evaluation.step <= step]
            events, _ = record.events(0, FIRST_EVENTS)
    except InvalidInputError:
        return None, None
    branched = (event.data for event in events if isinstance(event.data, RunBranched) and event.data.branch == run)
    parents = (ParentCheckpoint(data.parent, data.step) for data in branched)
    return max(evaluations, key=lambda evaluation: evaluation.step, default=None), next(parents, None)


def parent_by(manifest: Manifest, run: str) -> ParentCheckpoint | None:
    """Return what the run branched off, by the checkpoint that it continues from: another run's, or one of its own."""
    if manifest.run != run:
        return ParentCheckpoint(manifest.run, manifest.step)
    return manifest.metadata.lineage.parent if manifest.metadata is not None else None


def recipe_of(config: RunFile) -> dict[str, Any]:
    """Return a run file for a checkpoint, without what it must not give away."""
    recipe = run_file.to_dict(config)
    for table in recipe.get("nodes", {}).values():
        table.pop("env", None)  # may hold secrets, and checkpoints are given away
    return recipe


class HostCopy:
    """Arrays in main memory for copies of the state. Where the library writes to its arrays in place, they are copied
    into arrays that are made once and used again: fresh memory would take longer to touch than to fill."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._arrays: dict[SlotName, dict[str, Array] | None] = {}  # None: copies need none

    def take(self) -> State:
        """Return the state as it is now, valid until the next call. Raises MemoryError if device or host have no room
        for it; then nothing of it is kept."""
        try:
            return self._backend.export_state(self._copy)
        except (RuntimeError, MemoryError) as error:
            if not self._backend.is_out_of_memory(error):
                raise
            problem = first_line(error)
        self._arrays.clear()
        self._backend.device.free_cache()  # outside the handler, so that the traceback's frames hold no arrays
        raise MemoryError(f"out of memory for the copy of the state: {problem}")

    def release(self) -> None:
        """Give its memory back."""
        self._arrays.clear()

    def _copy(self, slot: SlotName) -> Mapping[str, Array]:
        if slot not in self._arrays:
            self._arrays[slot] = self._backend.device.host_arrays(self._backend.shapes)
        return self._backend.copy_out(slot, self._arrays[slot])
