"""The fused model in MLX's 4-bit format, by mlx-lm."""

import importlib.util
from pathlib import Path
from typing import Any

from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.exports.result_files import copy_carried

GROUP_SIZE, BITS = 64, 4
"""Weights that share a scale, and bits of each: mlx-lm's defaults."""


def check_mlx_installed(field: str, what: str) -> None:
    """Raises InvalidInputError without mlx-lm, naming the option `field` that needs it."""
    if importlib.util.find_spec("mlx_lm") is None:
        raise InvalidInputError(field, f"{what} needs mlx-lm; {installing('mlx')}")


def write_quantized(fused: Path, folder: Path) -> None:
    """Quantise the model in the directory `fused`. Layers whose width GROUP_SIZE doesn't divide stay as they are."""
    from mlx_lm import utils

    model, config = utils.load_model(fused, lazy=True)
    model, config = utils.quantize_model(model, config, GROUP_SIZE, BITS)
    utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    copy_carried(fused, folder)


def dequantized(folder: Path) -> dict[str, Any]:
    """The weights in a quantised directory as float32 arrays of MLX, by name: of each layer what is stored counts, not
    what the configuration says of all."""
    import mlx.core as mx

    stored: dict[str, Any] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        loaded: Any = mx.load(str(path))
        stored |= loaded
    found: dict[str, Any] = {}
    for name, array in stored.items():
        layer, _, part = name.rpartition(".")
        if part in ("scales", "biases") and f"{layer}.scales" in stored:
            continue
        if part == "weight" and f"{layer}.scales" in stored:
            scales, biases = (stored[f"{layer}.{key}"].astype(mx.float32) for key in ("scales", "biases"))
            found[name] = mx.dequantize(array, scales, biases, group_size=GROUP_SIZE, bits=BITS)
        else:
            found[name] = array.astype(mx.float32)
    return found
