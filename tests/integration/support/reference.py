"""The curve of one rank that has all of each batch and that nothing disturbs, worked out in the test's own process."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from trainctl.node_agent.planning import plans
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file, run_tables
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.load import load
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.loop import train
from trainctl.trainer.reference import ReferenceSettings, prepare_reference, wants_reference
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

ALONE = Identity("alone", "here", 0)
GENERATION = m.Generation(1, 1)


def one_rank_curve(
    config: dict[str, Any], steps: int | None = None, perturbation: float = 0.0, draw: int = 1
) -> list[m.StepCommitted]:
    """The first steps, or all, of a run file as parsed, on its only node's backend and with its micro-batch. What would
    be times is 0. `perturbation`: each weight of the model is changed by at most this part of itself, by chance;
    another `draw` changes them otherwise."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = _perturbed(Path(config["model"]["path"]), folder / "model", perturbation, draw)
        run = run_file.parse(config | {"model": config["model"] | {"path": str(model)}})
        status = StatusWriter(folder / "status", os.getpid())
        dataset = open_dataset(run, folder, "reference")
        rank = _rank(run, dataset, status, folder)
        plans = _plans(run, dataset, steps or run.run.steps)
        curve = [_committed(plan, train(rank, plan, time.perf_counter())) for plan in plans]
        rank.close()
        status.close()
    return curve


def _perturbed(model: Path, folder: Path, perturbation: float, draw: int) -> Path:
    if not perturbation:
        return model
    shutil.copytree(model, folder)
    chance = np.random.default_rng(draw)
    weights = load_file(folder / "model.safetensors")
    for name, values in weights.items():
        weights[name] = (values * (1 + perturbation * chance.uniform(-1, 1, values.shape))).astype(values.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def _rank(run: run_tables.RunFile, dataset: Dataset, status: StatusWriter, folder: Path) -> Rank:
    progress = Progress()
    progress.load(0, 0)
    assert progress.form(m.Form(run=ALONE.run, generation=GENERATION, engine="none", ranks=(ALONE.rank,)))
    ((name, node),) = run.nodes.items()
    backend = load(run, node, "reference")
    if wants_reference(run):
        model = model_digests(Path(run.model.path)).whole
        prepare_reference(ReferenceSettings.of(run, name, folder, model), dataset, backend)
    return Rank(
        Identity(ALONE.run, name, ALONE.rank), run, backend, dataset, progress, status, send=lambda message: None
    )


def _plans(run: run_tables.RunFile, dataset: Dataset, steps: int) -> Iterator[m.StepPlan]:
    (node,) = run.nodes.values()
    batch, divisor = run.batch.global_, plans.divisor(run.batch.global_, dataset.mean_weight)
    for step in range(1, steps + 1):
        cursor = (step - 1) * batch
        yield m.StepPlan(
            run=ALONE.run, generation=GENERATION, seq=step, kind="train", step=step, plan_version=1, cursor=cursor,
            global_batch=batch, divisor=divisor,
            learning_rate=plans.base_rate(run.optimizer, run.run.steps, step),
            work=(m.RankWork(ALONE.rank, (m.Range(cursor, batch),), node.micro or run.batch.micro),),
        )  # fmt: skip


def _committed(plan: m.StepPlan, report: m.Report) -> m.StepCommitted:
    return m.StepCommitted(
        run=plan.run, generation=plan.generation, step=plan.step, committed_at=0.0, step_seconds=0.0, tokens_total=0.0,
        loss=report.loss_sum / report.weight, weight=report.weight, samples=plan.global_batch,
        learning_rate=plan.learning_rate, grad_norm=report.grad_norm, cursor=plan.cursor + plan.global_batch,
        global_batch=plan.global_batch, plan_version=plan.plan_version,
    )  # fmt: skip
