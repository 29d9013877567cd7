"""Checkpoints of a few numbers."""

from pathlib import Path

import numpy as np

from trainctl.trainer.backends.backend import State
from trainctl.trainer.checkpoints import files


def loop_of(step: int) -> files.LoopState:
    return files.LoopState(
        step=step,
        cursor=step,
        updates=step,
        loss_scale=1.0,
        loss_scale_good_steps=0,
        seed=0,
        samples=9,
        layout_digest="l",
        data_digest="d",
    )


def write_small(folder: Path, model: Path, step: int, value: float, count: int = 2) -> Path:
    """Write a checkpoint of a weight with so many equal numbers."""
    array = {"w": np.full(count, value, np.float32)}
    state = State(array, {"exp_avg": array, "exp_avg_sq": array}, step, {"torch.cpu": np.arange(3, dtype=np.uint8)})
    files.write(folder / f"step-{step}", "r", loop_of(step), state, model)
    return folder / f"step-{step}"


def written(run: Path, step: int, value: float = 1.0) -> Path:
    return write_small(run / "checkpoints", run.parents[1] / "model", step, value, 2000)


def run_directory(folder: Path) -> Path:
    """Return the directory of a run beside its model, for `written`."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}", "utf-8")
    (folder / "model" / "merges.txt").touch()  # an empty file is copied too
    return folder / "runs" / "run-1"
