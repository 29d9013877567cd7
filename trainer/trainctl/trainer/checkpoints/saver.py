"""One rank's checkpoints: written of the last committed step, and loaded at the start."""

import time
from pathlib import Path

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.record.best import best_checkpoint
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.backends.loss_scale import LossScale
from trainctl.trainer.checkpoints import files
from trainctl.trainer.data.training_data import Look, Seen, TrainingData
from trainctl.trainer.step.progress import Progress


class Saver:
    """Moves the loop's whole state to and from folders of a run directory."""

    def __init__(
        self, run: str, config: RunFile, paths: RunPaths, backend: Backend, dataset: TrainingData, progress: Progress,
        scale: LossScale, layout_digest: str, model_digest: str,
    ) -> None:  # fmt: skip
        self._run, self._config, self._paths = run, config, paths
        self._backend, self._dataset, self._progress, self._scale = backend, dataset, progress, scale
        self._layout_digest, self._model_digest = layout_digest, model_digest

    def resume(self, folder: Path | None, look: Look = lambda: None) -> None:
        """Stand where the checkpoint in `folder` stood, or at the beginning; then clear away what writers that died
        left. `look`: what may end the wait for a growing file. Raises InvalidInputError if it doesn't fit."""
        if folder is None:
            self._progress.load(0, 0)
        else:
            self._take_up(folder, look)
        files.tidy(self._paths.checkpoints)  # not earlier: `folder` may be one that has to be put back

    def write(self) -> m.CheckpointInfo:
        """Of the last committed step; older ones beyond keep_last go, but for the best. Raises OSError."""
        begun = time.perf_counter()
        state = self._backend.export_state()
        folder = self._paths.checkpoint(self._progress.last_step)
        model = Path(self._config.model.path)
        lora = self._backend.parts.adapter
        loop = self._loop_state(self._progress.cursor, state.updates)
        manifest = files.write(
            folder, self._run, loop, state, model, self._backend.compute,
            lora.peft_config(model) if lora else None,
        )  # fmt: skip
        best = best_checkpoint(self._paths) if self._config.checkpoint.keep_best else None
        files.prune(self._paths.checkpoints, self._config.checkpoint.keep_last, [folder, *([best] if best else [])])
        spent = time.perf_counter() - begun
        return m.CheckpointInfo(str(folder), self._progress.last_step, manifest.size_bytes, spent)

    def _take_up(self, folder: Path, look: Look) -> None:
        found = files.read(folder)
        loop = found.loop
        self._dataset.check_seen(Seen(loop.samples, loop.data_digest, loop.chunks), loop.cursor, look)
        files.check_fits(loop, self._loop_state(loop.cursor, 0), str(folder))
        self._backend.import_state(found.state)
        self._scale.value = found.loop.loss_scale
        self._scale.good_steps = found.loop.loss_scale_good_steps
        self._progress.load(found.loop.step, found.loop.cursor)

    def _loop_state(self, cursor: int, updates: int) -> files.LoopState:
        seen = self._dataset.seen(cursor)
        return files.LoopState(
            step=self._progress.last_step, cursor=cursor, updates=updates, loss_scale=self._scale.value,
            loss_scale_good_steps=self._scale.good_steps, seed=self._config.run.seed, samples=seen.samples,
            layout_digest=self._layout_digest, data_digest=seen.digest, chunks=seen.chunks,
            base_digest=files.base_digest(self._model_digest, self._backend.parts.adapter),
        )  # fmt: skip
