"""Records the healthy curves of tests/golden/curves.npy: small models, trained by the product's own trainer.

`python -m tests.trainer.support.healthy_curves FILE` writes them again, in about two minutes on one core.
"""

import json
import math
import os
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.step.executor import Executor, Identity, Settings
from trainctl.trainer.step.progress import Progress

TEXT = Path(__file__).resolve().parents[3] / "examples" / "speeches.txt"
STEPS, LENGTH = 500, 32
GENERATION = m.Generation(1, 1)


class Setting(NamedTuple):
    """What differs between the curves."""

    seed: int
    learning_rate: float  # highest
    batch: int
    samples: int  # of which an epoch consists
    schedule: str

    def rate(self, step: int) -> float:
        """The learning rate of a step."""
        if self.schedule == "constant":
            return self.learning_rate
        warm = min(1.0, step / 40)
        falling = 0.5 * (1 + math.cos(math.pi * step / STEPS)) if self.schedule == "cosine" else 1 - step / STEPS
        return self.learning_rate * warm * max(falling, 0.02)


SETTINGS = tuple(
    Setting(seed, rate, batch, samples, schedule)
    for seed, (rate, batch, samples, schedule) in enumerate(islice(zip(
        cycle((3e-4, 1e-3, 3e-3, 6e-3)), cycle((2, 4, 8, 12, 16)), cycle((60, 400, 2000)),
        cycle(("constant", "cosine", "linear")),
    ), 20))
)  # fmt: skip


def recorded(setting: Setting, folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    config = run_file.parse({
        "run": {"name": "healthy", "steps": STEPS, "seed": setting.seed}, "model": {"path": str(folder / "model")},
        "data": {
            "path": str(_samples(setting, folder)), "kind": "samples", "sequence_length": LENGTH, "held_out": 0.0,
        },
        "batch": {"global": setting.batch, "micro": setting.batch}, "optimizer": {"learning_rate": 1e-3},
        "nodes": {"here": {"backend": "torch", "device": "cpu", "threads": 1}},
    })  # fmt: skip
    shape: dict[str, Any] = {"hidden": 32, "layers": 2, "heads": 2, "intermediate": 64}
    demo_assets.make_model(folder / "model", demo_assets.llama_config(**shape), seed=setting.seed)
    progress, status = Progress(), StatusWriter(folder / "status", os.getpid())
    progress.load(0, 0)
    progress.form(m.Form(run="r", generation=GENERATION, engine="none", ranks=(0,)))
    executor = Executor(
        Identity("r", "here", 0), Settings.of(config, "here"), load(config, config.nodes["here"], "run.toml"),
        open_dataset(config, folder / "data", "run.toml"), progress, status, lambda _: None,
    )  # fmt: skip
    reports = [executor.train(_plan(setting, step), time.perf_counter()) for step in range(1, STEPS + 1)]
    executor.close()
    status.close()
    return [(report.loss_sum / report.weight, report.grad_norm) for report in reports]


def _samples(setting: Setting, folder: Path) -> Path:
    """Pieces of the text, a token per byte."""
    text, path = TEXT.read_bytes(), folder / "samples.jsonl"
    starts = np.random.default_rng(setting.seed).integers(0, len(text) - LENGTH, setting.samples)
    path.write_text("".join(json.dumps({"tokens": [*text[at : at + LENGTH]]}) + "\n" for at in starts))
    return path


def _plan(setting: Setting, step: int) -> m.StepPlan:
    cursor, batch = setting.batch * (step - 1), setting.batch
    return m.StepPlan(
        run="r", generation=GENERATION, seq=step, kind="train", step=step, plan_version=1, cursor=cursor,
        global_batch=batch, work=(m.RankWork(0, (m.Range(cursor, batch),), batch),),
        learning_rate=setting.rate(step), divisor=float(batch * LENGTH),
    )  # fmt: skip


def main() -> None:
    """Train them all, and write an array of (curve, step, loss and norm)."""
    curves = []
    for setting in SETTINGS:
        with tempfile.TemporaryDirectory() as name:
            curves.append(recorded(setting, Path(name)))
        print(setting, f"loss {curves[-1][0][0]:.2f} -> {curves[-1][-1][0]:.2f}", flush=True)
    np.save(sys.argv[1], np.array(curves, np.float16))


if __name__ == "__main__":
    main()
