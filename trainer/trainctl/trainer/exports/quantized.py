"""Models in MLX's quantized formats, by mlx-lm."""

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.config.quantization import (
    QUANTIZED_PARTS,
    Quantization,
    is_quantized,
    layer_parts,
    quantization_of,
)
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.backends import rope_config
from trainctl.trainer.common.model_files import model_config
from trainctl.trainer.exports.result_files import copy_carried


def check_mlx_installed(field: str, what: str) -> None:
    """Raises InvalidInputError without mlx-lm, naming the option `field` that needs it."""
    if importlib.util.find_spec("mlx_lm") is None:
        raise InvalidInputError(field, f"{what} needs mlx-lm; {installing('mlx')}")


def write_quantized(whole: Path, folder: Path, how: Quantization) -> None:
    """Quantize the model in the directory `whole`. Layers whose width the group size doesn't divide stay as they
    are. The configuration has RoPE in both layouts, without which mlx-lm can't load some families."""
    from mlx_lm import utils

    both = rope_config.changed(rope_config.read(whole), whole)
    model, config = utils.load_model(whole, lazy=True, model_config=both)
    model, config = utils.quantize_model(model, config, how.group_size, how.bits, mode=how.mode)
    utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    copy_carried(whole, folder)


def dequantized_weights(folder: Path) -> dict[str, Any]:
    """The weights in a quantized directory as float32 arrays of MLX, by name."""
    import mlx.core as mx

    stored: dict[str, Any] = {}
    for path in weight_files(folder):
        loaded: Any = mx.load(str(path))
        stored |= loaded
    config = model_config(folder)
    return {
        name: dequantized(how, parts) if how is not None else parts["weight"].astype(mx.float32)
        for name, how, parts in whole_weights(stored, config)
    }


def whole_weights(
    stored: Mapping[str, Any], config: Mapping[str, Any]
) -> Iterator[tuple[str, Quantization | None, dict[str, Any]]]:
    """Each weight by name, how it is packed (None: it is whole), and its parts: of each layer what is stored counts,
    not what the configuration says of all. Raises InvalidInputError for a format that isn't MLX's."""
    for name, array in stored.items():
        layer, _, part = name.rpartition(".")
        if not is_quantized(layer, stored):
            yield name, None, {"weight": array}
        elif part == "weight":
            yield name, quantization_of(config, layer), layer_parts(stored, layer)
        elif part not in QUANTIZED_PARTS:
            yield name, None, {"weight": array}


def dequantized(how: Quantization, parts: Mapping[str, Any]) -> Any:
    """A layer's weight in float32, from MLX arrays."""
    import mlx.core as mx

    scales, biases = parts["scales"], parts.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(parts["weight"], scales, biases, how.group_size, how.bits, how.mode, dtype=mx.float32)
