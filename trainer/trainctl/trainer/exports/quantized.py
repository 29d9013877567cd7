"""Models in MLX's quantized formats, by mlx-lm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.config.quantization import (
    Quantization,
    is_quantized,
    layer_parts,
    quantization_of,
    whole_shapes,
)
from trainctl.trainer.common.model_files import model_config, only_the_model
from trainctl.trainer.exports.answers import opened_by
from trainctl.trainer.exports.result_files import copy_carried
from trainctl.trainer.model import rope_config


def write_quantized(whole: Path, folder: Path, how: Quantization) -> None:
    """Quantize the model in the directory `whole`. mlx-lm leaves layers whose width the group size doesn't divide as
    they are: the caller decides about them. The config.json states RoPE where mlx-lm and transformers look for it."""
    from mlx_lm import utils

    with only_the_model(whole, rope_config.read(whole)) as clean:
        with opened_by("mlx-lm"):
            model, config = utils.load_model(clean, lazy=True)
        model, config = utils.quantize_model(model, config, how.group_size, how.bits, mode=how.mode)
        utils.save_model(folder, model)
    utils.save_config(config, folder / "config.json")
    copy_carried(whole, folder)


def dequantized_weights(folder: Path) -> dict[str, Any]:
    """The weights in a quantized directory as float32 arrays of MLX, by name: of each layer what is stored counts, not
    what the configuration says of all."""
    import mlx.core as mx

    stored: dict[str, Any] = {}
    for path in weight_files(folder):
        loaded: Any = mx.load(str(path))
        stored |= loaded
    config, found = model_config(folder), dict[str, Any]()
    for name in whole_shapes({name: tuple(array.shape) for name, array in stored.items()}, config):
        layer = name.removesuffix(".weight")
        how = quantization_of(config, layer) if is_quantized(layer, stored) else None
        if how is None:
            found[name] = stored[name].astype(mx.float32)
        else:
            found[name] = dequantized(how, {part: stored[key] for part, key in layer_parts(layer, stored).items()})
    return found


def dequantized(how: Quantization, parts: Mapping[str, Any]) -> Any:
    """A layer's weight in float32, from MLX arrays."""
    import mlx.core as mx

    scales, biases = parts["scales"], parts.get("biases")
    if biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(parts["weight"], scales, biases, how.group_size, how.bits, how.mode, dtype=mx.float32)
