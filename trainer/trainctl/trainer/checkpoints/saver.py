"""One rank's checkpoints: copied of the last committed step, written from the copy, and loaded at the start."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.record.best import best_checkpoint
from trainctl.protocol.record.checkpoint_metadata import Lineage, ParentCheckpoint
from trainctl.protocol.record.checkpoints import Manifest, read_manifest
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.backends.backend import Backend, SlotName, State
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.checkpoints import files, metadata, retention
from trainctl.trainer.checkpoints.background import WriteMeter
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.data.training_data import Look, Seen, TrainingData
from trainctl.trainer.step.progress import LossScale, Progress


@dataclass(frozen=True)
class Copied:
    """The loop's whole state of one step, in main memory."""

    loop: files.LoopState
    state: State
    report: m.Report | None  # of the newest step
    generation: m.Generation | None  # that committed the step
    loop_seconds: float  # time that the copy took
    version: int = 0  # of the state, as Progress counts them

    @property
    def bytes(self) -> int:
        parts = [self.state.weights, self.state.constants, *self.state.slots.values()]
        return sum(array.nbytes for part in parts for array in part.values())

    def meter(self) -> WriteMeter:
        """Of its write: each byte is written and read back."""
        return WriteMeter(self.loop.step, 2 * self.bytes)


class Saver:
    """Moves the loop's whole state to and from folders of a run directory."""

    def __init__(
        self, run: str, config: RunFile, paths: RunPaths, backend: Backend, dataset: TrainingData, progress: Progress,
        scale: LossScale, layout_digest: str, model_digest: str, node: str = "",
    ) -> None:  # fmt: skip
        self._run, self._config, self._paths, self._node = run, config, paths, node
        self._backend, self._dataset, self._progress, self._scale = backend, dataset, progress, scale
        self._layout_digest, self._model_digest = layout_digest, model_digest
        self._host_copy = HostCopy(backend)
        self._environment = metadata.environment(node, backend)
        self._resumed_from: int | None = None
        self._parent: ParentCheckpoint | None = None  # by the checkpoint that was loaded

    def resume(self, folder: Path | None, look: Look = lambda: None) -> None:
        """Stand where the checkpoint in `folder` stood, or at the beginning; then clear away what writers that died
        left. `look`: what may end the wait for a growing file. Raises InvalidInputError if it doesn't fit."""
        if folder is None:
            self._progress.load(0, 0)
        else:
            self._take_up(folder, look)
        files.tidy(self._paths.checkpoints)  # not earlier: `folder` may be one that has to be put back

    def copy(self) -> Copied:
        """Of the last committed step; valid until the next call. Raises MemoryError."""
        begun = time.perf_counter()
        state = self._host_copy.take()
        progress = self._progress
        loop = self._loop_state(progress.cursor, state.updates)
        seconds = time.perf_counter() - begun
        return Copied(loop, state, progress.newest_report, progress.committed_in, seconds, progress.version)

    @property
    def version(self) -> int:
        """Of the state that a copy would hold now."""
        return self._progress.version

    def write_copy(
        self, copied: Copied, meter: WriteMeter, before_name: Callable[[], None] = lambda: None
    ) -> m.CheckpointInfo:
        """On any thread. `before_name` is called once all but the folder's final name is on the disk. Once it has been
        read back, older ones go that nothing keeps; what prevents that costs no checkpoint. Raises OSError, and
        InvalidInputError without the library that compresses."""
        begun, loop = time.perf_counter(), copied.loop
        folder, model = self._paths.checkpoint(loop.step), Path(self._config.model.path)
        manifest = files.write(
            folder, self._run, loop, copied.state, model, self._about(copied, model, meter, before_name)
        )
        kept, problem = self._prune(folder)
        seconds = time.perf_counter() - begun
        return m.CheckpointInfo(
            str(folder), loop.step, manifest.size_bytes, copied.loop_seconds, seconds, kept, problem
        )  # fmt: skip

    def _prune(self, newest: Path) -> tuple[tuple[int, ...], str]:
        """The steps that stay, if they are known, and why older checkpoints couldn't be removed. The newest one stays,
        and no other goes because of it: its own evaluation may still come."""
        table, problem = self._config.checkpoint, ""
        try:
            best = best_checkpoint(self._paths, retention.step_of(newest)) if table.keep_best else None
            kept = [newest, *([best] if best else [])]
            retention.prune(self._paths.checkpoints, table.keep_last, kept, table.keep_every)
        except Exception as error:  # noqa: BLE001  the checkpoint is complete, whatever its neighbours do
            problem = first_line(error)
            log.warning("older checkpoints couldn't be removed: %s", problem)
        try:
            return retention.kept_steps(self._paths.checkpoints), problem
        except OSError as error:
            return (), problem or first_line(error)

    def write(self, before_name: Callable[[], None] = lambda: None) -> m.CheckpointInfo:
        """Copy and write at once; training waits. Raises as `write_copy`."""
        begun, copied = time.perf_counter(), self.copy()
        try:
            info = self.write_copy(copied, copied.meter(), before_name)
        finally:
            del copied
            self._host_copy.release()
        return msgspec.structs.replace(info, loop_seconds=time.perf_counter() - begun)

    def _about(self, copied: Copied, model: Path, meter: WriteMeter, before_name: Callable[[], None]) -> files.About:
        loop, lora = copied.loop, self._backend.recipe.adapter
        newest = metadata.newest_evaluation(self._paths, loop.step)
        lineage = Lineage(
            run=self._run, resumed_from=self._resumed_from, generation=copied.generation,
            parent=metadata.recorded_parent(self._paths, self._run) or self._parent,
        )  # fmt: skip
        done = metadata.performance(loop.step, copied.report, newest)
        return files.About(
            compute=self._backend.compute, adapter=lora.peft_config(model) if lora else None,
            metadata=metadata.metadata(self._config, lineage, done, self._environment),
            compression=self._config.checkpoint.compression, meter=meter, before_name=before_name,
        )  # fmt: skip

    def _take_up(self, folder: Path, look: Look) -> None:
        found = files.read(folder)
        loop = found.loop
        self._dataset.check_seen(Seen(loop.samples, loop.data_digest, loop.chunks), loop.cursor, look)
        model, lora = Path(self._config.model.path), self._backend.recipe.adapter
        files.check_fits(loop, self._loop_state(loop.cursor, 0), str(folder), model, lora)
        self._backend.import_state(found.state)
        manifest = read_manifest(folder)
        if self._has_its_scale(manifest):
            self._scale.value, self._scale.good_steps = loop.loss_scale, loop.loss_scale_good_steps
        self._progress.load(loop.step, loop.cursor)
        self._resumed_from = loop.step
        self._parent = metadata.parent_by(manifest, self._run)

    def _has_its_scale(self, manifest: Manifest) -> bool:
        """Whether a checkpoint's loss scale is one for this run: other types than float16 keep a factor of one."""
        stored = manifest.compute.dtype if manifest.compute is not None else None
        return self._config.model.computed == "float16" and stored in (None, "float16")

    def _loop_state(self, cursor: int, updates: int) -> files.LoopState:
        seen = self._dataset.seen(cursor)
        return files.LoopState(
            step=self._progress.last_step, cursor=cursor, updates=updates, loss_scale=self._scale.value,
            loss_scale_good_steps=self._scale.good_steps, seed=self._config.run.seed, samples=seen.samples,
            layout_digest=self._layout_digest, data_digest=seen.digest, chunks=seen.chunks,
            base_digest=files.base_digest(self._model_digest, self._backend.recipe.adapter),
        )  # fmt: skip


class HostCopy:
    """Where the library writes to its arrays in place, they are copied into arrays that are made once and used again:
    fresh memory would take longer to touch than to fill."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._arrays: dict[SlotName, dict[str, Array]] = {}

    def take(self) -> State:
        """The state as it is now; valid until the next call. Raises MemoryError if device or host have no room for it;
        then nothing of it is kept."""
        try:
            return self._backend.export_state(self._copy)
        except (RuntimeError, MemoryError) as error:
            if not self._backend.is_out_of_memory(error):
                raise
            problem = first_line(error)
        self._arrays.clear()
        self._backend.discard()  # outside the handler, so that the traceback's frames hold no arrays
        raise MemoryError(f"out of memory for the copy of the state: {problem}")

    def release(self) -> None:
        """Give its memory back."""
        self._arrays.clear()

    def _copy(self, slot: SlotName) -> dict[str, Array]:
        if (unchanging := self._backend.unchanging_arrays(slot)) is not None:
            return unchanging
        arrays = self._arrays.get(slot) or self._backend.host_arrays()
        self._arrays[slot] = arrays
        self._backend.copy_out(slot, arrays)
        return arrays
