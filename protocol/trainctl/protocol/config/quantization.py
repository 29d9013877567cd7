"""Quantized models in MLX's format: what config.json says of it, and the shapes of the weights that are stored packed.

A quantized layer stores `weight`, 32-bit words of 32 / bits values each, `scales` of each group of values and, in the
affine formats, `biases`. mlx-lm leaves layers as they are whose width the group size doesn't divide, so what a layer
stores counts, and not what config.json says of all.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, get_args

from trainctl.protocol.errors import InvalidInputError

QuantizedFormat = Literal["mlx-4bit", "mlx-8bit", "mxfp4", "nvfp4"]
FORMATS: Final = get_args(QuantizedFormat)
QUANTIZATION_KEYS = ("quantization", "quantization_config")
_WORD_BITS = 32
QUANTIZED_PARTS: Final = ("weight", "scales", "biases")
"""What a packed layer stores; the affine formats alone have biases."""


class Quantization(NamedTuple):
    """How a layer's values are stored."""

    mode: str  # "affine", "mxfp4" or "nvfp4"
    bits: int  # of a value
    group_size: int  # values that share a scale


DEFAULTS: Final[Mapping[str, Quantization]] = {
    "mlx-4bit": Quantization("affine", 4, 64),
    "mlx-8bit": Quantization("affine", 8, 64),
    "mxfp4": Quantization("mxfp4", 4, 32),
    "nvfp4": Quantization("nvfp4", 4, 16),
}
"""mlx-lm's group sizes; those of mxfp4 and nvfp4 are part of the format."""


def quantization_key(config: Mapping[str, Any]) -> str | None:
    """The key of a model's configuration that says that its weights are quantized."""
    return next((key for key in QUANTIZATION_KEYS if config.get(key)), None)


def quantization_of(config: Mapping[str, Any], layer: str = "") -> Quantization | None:
    """Of a layer by its path in the model, or of all that aren't named; None: of a whole model. Raises
    InvalidInputError for a format that isn't MLX's."""
    key = quantization_key(config)
    if key is None:
        return None
    stated: Any = config[key]
    table = stated.get(layer, stated) if isinstance(stated, dict) else None
    table = table if isinstance(table, dict) else stated
    mode = table.get("mode", "affine") if isinstance(table, dict) else None
    sizes = [table.get(name) for name in ("bits", "group_size")] if isinstance(table, dict) else [None]
    if mode in {made.mode for made in DEFAULTS.values()} and all(isinstance(size, int) and size > 0 for size in sizes):
        found = Quantization(str(mode), *sizes)
        if found.bits in (4, 8):
            return found
    method = stated.get("quant_method") or stated.get("mode") if isinstance(stated, dict) else None
    named = f" ({method})" if isinstance(method, str) else ""
    raise InvalidInputError(
        key,
        f"quantized in a format{named} that can't be trained on; quantize the whole model with trainctl quantize, or "
        f"take one in MLX's format ({', '.join(FORMATS)})",
    )


def format_of(config: Mapping[str, Any]) -> str | None:
    """The name of a model's format, such as "mlx-4bit"; None: not quantized. Raises as `quantization_of`."""
    found = quantization_of(config)
    if found is None:
        return None
    same = [name for name, made in DEFAULTS.items() if (made.mode, made.bits) == (found.mode, found.bits)]
    return next(iter(same), f"{found.mode} of {found.bits} bits")


def is_quantized(layer: str, names: Mapping[str, object]) -> bool:
    """Whether a layer is stored packed, by the names of all that is stored."""
    return f"{layer}.scales" in names


def layer_parts(stored: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """The parts of a packed layer by their own names."""
    return {part: stored[f"{layer}.{part}"] for part in QUANTIZED_PARTS if f"{layer}.{part}" in stored}


def whole_shapes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that a directory's tensors stand for, by name: scales and biases are parts of them.
    Raises as `quantization_of`."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".")
        if not is_quantized(layer, shapes):
            found[name] = shape
        elif part == "weight":
            how = quantization_of(config, layer)
            per_word = _WORD_BITS // how.bits if how is not None else 1
            found[name] = (*shape[:-1], shape[-1] * per_word)
        elif part not in QUANTIZED_PARTS:
            found[name] = shape
    return found


def quantized_bytes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """The bytes that a rank holds of each weight that is stored packed, by name. Scales and biases of the affine
    formats are held in float32, other scales in a byte."""
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".")
        if part == "weight" and is_quantized(layer, shapes):
            scales, has_biases = math.prod(shapes[f"{layer}.scales"]), f"{layer}.biases" in shapes
            found[name] = 4 * math.prod(shape) + (8 * scales if has_biases else scales)
    return found


def check_base(wanted: str, config: Mapping[str, Any], model: Path, where: str) -> None:
    """Whether a model directory has the format that a run file wants; "stored": any; "nf4", which is made as the model
    is loaded: none. Raises InvalidInputError blaming `where`."""
    try:
        found = format_of(config)
    except InvalidInputError as error:
        raise InvalidInputError(where, f"{model / 'config.json'}: {error.where}: {error.problem}") from None
    if wanted in ("stored", found) or (wanted == "nf4" and found is None):
        return
    if wanted == "nf4":
        raise InvalidInputError(where, f'model.base = "nf4" needs the whole model, but it is {found} in {model}')
    what = f"it is {found}" if found else "its weights are whole"
    make = "the whole model" if found else str(model)
    raise InvalidInputError(
        where, f'model.base = "{wanted}", but {what} in {model}: run trainctl quantize {make} --to {wanted}, and set '
        "model.path to the directory that it makes"
    )  # fmt: skip
