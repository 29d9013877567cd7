"""A run directory as a short training leaves it: its run file, its checkpoints by the saver, its record."""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w
from tests.node_agent.support import records
from tests.trainer.support.chat_model import questions, write_rows

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.config import run_file, run_tables
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.load import load
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.checkpoints.saver import Saver
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

G, RATE = 8, 2e-2


class TrainedRun:
    """`log_probabilities` are the trained model's of `batch`, by the backend that trained it."""

    def __init__(
        self, directory: Path, model: Path, backend: str, adapter: Mapping[str, Any], *, steps: int = 4,
        saved: Sequence[int] = (4,), held_out: Mapping[int, float] | None = None,
        checkpoint: Mapping[str, Any] | None = None, objective: str = "auto",
        data: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.paths = RunPaths(directory)
        directory.mkdir(parents=True)
        config = _config(directory, model, backend, adapter, steps, checkpoint or {"keep_last": 4}, objective, data)
        self.paths.run_file.write_text(tomli_w.dumps(run_file.to_dict(config)), "utf-8")
        self._dataset = open_dataset(config, directory / "data", "run.toml")
        self._backend = load(config, config.nodes["here"], "run.toml")
        self._progress = Progress()
        who = Identity(directory.name, "", 0)
        status = StatusWriter(self.paths.status_page(0), os.getpid())
        rank = Rank(who, config, self._backend, self._dataset, self._progress, status, send=lambda message: None)
        self._saver = Saver(rank, config, self.paths, model_digests(model).whole)
        self.batch: Batch = self._dataset.batch(np.arange(6))
        with RunDb(self.paths, resumable=False) as record:
            for step in range(1, steps + 1):
                self._train(step, record)
                if step in saved:
                    self._saver.write()
                if held_out and step in held_out:
                    record.evaluation(step, 1000.0 + step, held_out[step], 100.0, 0.5)
        self.log_probabilities: Array = self._backend.token_log_probabilities(self.batch)

    def _train(self, step: int, record: RunDb) -> None:
        batch = self._dataset.batch(np.arange(step * G, (step + 1) * G) % self._dataset.samples)
        self._backend.clear()
        self._backend.loss_and_gradient(batch, {"tokens": 1.0}, adding=nullcontext())
        loss = self._backend.sums().losses["tokens"] / batch.weight
        self._backend.update(RATE, 1 / batch.weight)
        self._progress.load(step, step * G)
        committed = msgspec.structs.replace(records.step(step, loss=loss), run=self.paths.directory.name)
        record.commit(committed, [records.part(step)], 1000.0 + step)


def _config(
    directory: Path,
    model: Path,
    backend: str,
    adapter: Mapping[str, Any],
    steps: int,
    checkpoint: Mapping[str, Any],
    objective: str,
    data: Mapping[str, Any] | None,
) -> run_tables.RunFile:
    if data is None:
        rows = write_rows(directory.with_name("rows.jsonl"), questions(60))
        data = {"path": str(rows), "kind": "rows", "sequence_length": 64}
    raw = {
        "run": {"name": "small", "steps": steps, "seed": 3}, "model": {"path": str(model)},
        "data": {**data, "held_out": 0.05},
        "batch": {"global": G, "micro": 4}, "optimizer": {"learning_rate": RATE}, "adapter": dict(adapter),
        "checkpoint": dict(checkpoint), "objective": {"kind": objective},
        "nodes": {"here": {"backend": backend, "device": "cpu", "threads": 1}},
    }  # fmt: skip
    return run_file.parse(raw)
