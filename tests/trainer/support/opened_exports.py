"""Exports as the libraries that they are for open them, and their distance from what the run's backend computed."""

from pathlib import Path
from typing import Any

import numpy as np
from tests.trainer.support.trained_run import TrainedRun

from trainctl.trainer.exports.verification import mlx_logits, torch_logits


def by_torch(folder: Path, run: TrainedRun) -> Any:
    """Return the logits of the run's batch by peft, if `folder` has adapters, or by transformers."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    adapted = (folder / "adapter_config.json").exists()
    kind: Any = AutoPeftModelForCausalLM if adapted else AutoModelForCausalLM
    return torch_logits(kind.from_pretrained(folder), run.batch.inputs.astype(np.int64))


def by_mlx(folder: Path, run: TrainedRun, base: Path | None = None) -> Any:
    """Return the logits of the run's batch by mlx-lm, of the adapters in `folder` if there is a base."""
    from mlx_lm.utils import load_adapters, load_model

    model, _ = load_model(base or folder)
    return mlx_logits(load_adapters(model, str(folder)) if base else model, run.batch.inputs.astype(np.int64))


def difference(logits: Any, run: TrainedRun) -> float:
    """Return the largest difference from the log-probabilities that the training backend gave the targets."""
    shifted = logits - logits.max(-1, keepdims=True)
    log_probabilities = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_probabilities, run.batch.targets[..., None].astype(np.int64), -1)[..., 0]
    return float(np.abs(picked - run.log_probabilities)[run.batch.counted > 0].max())
