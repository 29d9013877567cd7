"""Trains with the objective of patches/new_objective.patch, on both backends: `python -m` in a patched copy."""

import json
import math
import os
import tempfile
import time
from pathlib import Path

from tools.protocol_docs import docs

from trainctl.node_agent.conductor import rows
from trainctl.node_agent.exporter import catalogue
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.step.executor import Executor, Identity, Settings
from trainctl.trainer.step.progress import Progress
from trainctl.tui.charts import metrics

NAME, G = "z_loss", 12
GENERATION = m.Generation(1, 1)


def plan_of(step: int, micro: int) -> m.StepPlan:
    cursor = G * (step - 1)
    return m.StepPlan(
        run="r", generation=GENERATION, seq=step, kind="train", step=step, plan_version=1, cursor=cursor,
        global_batch=G, work=(m.RankWork(0, (m.Range(cursor, G),), micro),), learning_rate=3e-3, divisor=256.0,
    )  # fmt: skip


def trained(folder: Path, backend: str, micro: int) -> list[m.Report]:
    """Reports of the first steps."""
    config = run_file.parse({
        "run": {"name": "small", "steps": 9, "seed": 3}, "model": {"path": str(folder / "model")},
        "data": {"path": str(folder / "samples.jsonl"), "kind": "samples", "sequence_length": 20, "held_out": 0.0},
        "batch": {"global": G, "micro": micro}, "optimizer": {"learning_rate": 3e-3}, "objective": {"kind": "sft_z"},
        "nodes": {"here": {"backend": backend, "device": "cpu", "threads": 1}},
    })  # fmt: skip
    progress, status = Progress(), StatusWriter(folder / "status", os.getpid())
    progress.load(0, 0)
    progress.form(m.Form(run="r", generation=GENERATION, engine="none", ranks=(0,)))
    executor = Executor(
        Identity("r", "here", 0), Settings.of(config, "here"), load(config, config.nodes["here"], "run.toml"),
        open_dataset(config, folder / "data", "run.toml"), progress, status, lambda _: None,
    )  # fmt: skip
    made = [executor.train(plan_of(step, micro), time.perf_counter()) for step in range(1, 7)]
    executor.close()
    status.close()
    return made


def alike(one: list[m.Report], other: list[m.Report]) -> bool:
    return all(
        math.isclose(left.loss_sum, right.loss_sum, rel_tol=1e-5)
        and math.isclose(left.values[NAME], right.values[NAME], rel_tol=1e-5)
        for left, right in zip(one, other, strict=True)
    )


def works() -> m.Report:
    """It learns, alike however the batch is cut and on both backends."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = demo_assets.llama_config(hidden=32, layers=2, heads=2, intermediate=64)
        demo_assets.make_model(folder / "model", config, seed=7)
        lines = [{"tokens": [97 + (7 * i + j) % 26 for j in range(3 + i % 15)]} for i in range(40)]
        (folder / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        whole = trained(folder, "torch", G)
        assert whole[-1].loss_sum / whole[-1].weight < whole[0].loss_sum / whole[0].weight
        assert alike(trained(folder, "torch", 5), whole)
        assert alike(trained(folder, "mlx", 5), whole)
        return whole[-1]


def shown(report: m.Report) -> None:
    """As a metric of the run: in its row of the step, charts, Prometheus and the page of the protocol."""
    assert NAME in rows.step_committed(report, plan_of(6, G), 6 * G, rows.RunSums()).values
    assert NAME not in rows.rank_step(report, "here").values
    assert NAME in metrics.names()
    assert not metrics.per_rank(NAME)
    assert f"trainctl_{NAME}" in catalogue.SPECS
    assert f"| `{NAME}` |" in docs.page()


shown(works())
print("walked")
