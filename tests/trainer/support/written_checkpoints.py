"""Checkpoints of a few numbers."""

from pathlib import Path

import numpy as np

from trainctl.trainer.backends.base import State
from trainctl.trainer.checkpoints import files


def written(run: Path, step: int, value: float = 1.0) -> Path:
    array = {"w": np.full(2000, value, np.float32)}
    loop = files.LoopState(
        step=step, cursor=step, updates=step, loss_scale=1.0, loss_scale_good_steps=0, seed=0, samples=9,
        layout_digest="l", data_digest="d",
    )  # fmt: skip
    folder = run / "checkpoints" / f"step-{step}"
    files.write(folder, "run-1", loop, State(array, {"exp_avg": array}, step), run.parents[1] / "model")
    return folder
