"""Models for other programs, made by the trainer in a process of its own, for torch and MLX."""

import json
import subprocess
import sys
from typing import Any

from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError

EXPORT_MODEL = "trainctl.trainer.exports.export_model"
"""Module that exports a run's trained model."""


def make(words: list[str], module: str = EXPORT_MODEL) -> dict[str, Any]:
    """What the trainer made. Raises TrainctlError with what it said."""
    done = subprocess.run(
        [sys.executable, "-m", module, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    if not lines:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        name, reason = module.rpartition(".")[2], said[-1] if said else "no reason given"
        raise TrainctlError(f"{name} ended with status {done.returncode}: {reason}")
    told: dict[str, Any] = json.loads(lines[-1])
    if done.returncode == InvalidInputError.exit_code:
        raise InvalidInputError(told["where"], told["problem"])
    if done.returncode == RefusedError.exit_code:
        raise RefusedError(told["problem"])
    if done.returncode:
        raise TrainctlError(told["problem"])
    return told


def description(made: dict[str, Any]) -> str:
    """What was made, and how to use it, as lines."""
    weights = f", {made['dtype']}" if made["dtype"] and made["form"] != "mlx-4bit" else ""
    lines = [f"{made['folder']}: {made['form']} of step {made['step']:,}{weights}, {made['bytes']:,} bytes"]
    if made["not_verified"]:
        lines.append(f"not verified: {made['not_verified']}")
    if made["difference"] is not None:
        lines.append(f"verified: logits differ by at most {made['difference']:.1e} (allowed: {made['tolerance']:.1e})")
    if made["rounding"] is not None:
        lines.append(
            f"rounded to {made['dtype']}: logits differ from those of the trained model by {made['rounding']:.1e}"
        )
    if made["library"] is not None:
        lines.append(f"mlx-lm computes this family unlike transformers: its logits differ by {made['library']:.1e}")
    if made["warning"]:
        lines.append(f"warning: {made['warning']}")
    lines += ["to load it:", *(f"    {line}" for line in made["load"])]
    if made["llama_cpp"]:
        lines += ["for llama.cpp, by its own programs:", *(f"    {line}" for line in made["llama_cpp"])]
    return "\n".join(lines)
