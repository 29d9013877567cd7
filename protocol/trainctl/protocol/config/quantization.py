"""Quantized models in MLX's format: their settings in config.json, and the shapes of the weights that are packed.

A quantized layer stores `weight`, 32-bit words of 32 / bits values each, `scales` of each group of values and, in the
affine formats, `biases`. mlx-lm leaves layers as they are whose width the group size doesn't divide, so what a layer
stores counts, and not what config.json says about all layers.
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
"""The arrays that a packed layer stores; the affine formats alone have biases."""
UNPACKED_VALUES: Final = 1 << 25
"""Most values of a layer that a torch rank holds unpacked at once."""


class Quantization(NamedTuple):
    """The form in which a layer's values are stored."""

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


_ADVICE = f"take a model in one of MLX's formats ({', '.join(FORMATS)}), or make one with trainctl model quantize"


def quantization_key(config: Mapping[str, Any]) -> str | None:
    """The key of a model's configuration that says that its weights are quantized."""
    return next((key for key in QUANTIZATION_KEYS if config.get(key)), None)


def quantization_of(config: Mapping[str, Any], layer: str = "") -> Quantization | None:
    """Return the quantization of a layer by its path in the model, or of all that aren't named; None: of a whole model.
    Raises InvalidInputError for a format that isn't MLX's, or that torch can't unpack."""
    key = quantization_key(config)
    if key is None:
        return None
    stated: Any = config[key]
    other: Any = config.get(QUANTIZATION_KEYS[1])
    if isinstance(other, dict) and other != stated:
        raise InvalidInputError(key, f"{QUANTIZATION_KEYS[1]} differs from it; remove the wrong one from config.json")
    table = stated.get(layer) if isinstance(stated, dict) else None
    table = table if isinstance(table, dict) else stated
    if not isinstance(table, dict) or not isinstance(table.get("bits"), int) or "group_size" not in table:
        method = stated.get("quant_method") if isinstance(stated, dict) else None
        raise InvalidInputError(key, f"{method or 'its format'} isn't MLX's; {_ADVICE}")
    found = Quantization(str(table.get("mode", "affine")), table["bits"], table["group_size"])
    if (found.mode, found.bits) not in {(made.mode, made.bits) for made in DEFAULTS.values()}:
        named = f"{layer} has" if layer else "it has"
        raise InvalidInputError(key, f"{named} {found.mode} values of {found.bits} bits; {_ADVICE}")
    return found


def format_of(config: Mapping[str, Any]) -> str | None:
    """The name of a model's format, such as "mlx-4bit"; None: not quantized. Raises as `quantization_of`."""
    found = quantization_of(config)
    if found is None:
        return None
    return next(name for name, made in DEFAULTS.items() if (made.mode, made.bits) == (found.mode, found.bits))


def is_quantized(layer: str, names: Mapping[str, object]) -> bool:
    """Return whether a layer is stored packed, by the names of all that is stored."""
    return f"{layer}.scales" in names


def layer_parts(layer: str, names: Mapping[str, object]) -> dict[str, str]:
    """The stored names of a packed layer's parts by the parts' own, among all `names`."""
    return {part: f"{layer}.{part}" for part in QUANTIZED_PARTS if f"{layer}.{part}" in names}


def whole_shapes(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the weights that a directory's tensors stand for, by name: scales and biases are parts of them.
    Raises InvalidInputError as `quantization_of`, and for a layer whose parts don't fit together."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        layer, _, part = name.rpartition(".")
        if not is_quantized(layer, shapes):
            found[name] = shape
        elif part == "weight":
            found[name] = _whole_shape(layer, shapes, config)
        elif part not in QUANTIZED_PARTS or f"{layer}.weight" not in shapes:
            found[name] = shape
    return found


def _whole_shape(layer: str, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> tuple[int, ...]:
    how = quantization_of(config, layer)
    if how is None:
        raise InvalidInputError("quantization", f"{layer} is packed, but config.json doesn't say how; {_ADVICE}")
    parts = {part: shapes[name] for part, name in layer_parts(layer, shapes).items()}
    *rows, words = parts["weight"]
    whole = (*rows, words * _WORD_BITS // how.bits)
    groups = (*rows, whole[-1] // how.group_size)
    if (
        parts["scales"] != groups
        or ("biases" in parts) != (how.mode == "affine")
        or parts.get("biases", groups) != groups
    ):
        stored = ", ".join(f"{part} {list(shape)}" for part, shape in parts.items())
        problem = f"the tensors of {layer} ({stored}) don't fit {how.mode} values of {how.bits} bits"
        raise InvalidInputError("quantization", f"{problem} in groups of {how.group_size}; make the directory again")
    return whole


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
    """Check whether a model directory has the format that a run file wants; "stored": any; "nf4", which is made as the
    model is loaded: none. Raises InvalidInputError blaming `where`."""
    try:
        found = format_of(config)
    except InvalidInputError as error:
        raise InvalidInputError(where, f"{model / 'config.json'}: {error.where}: {error.problem}") from None
    if wanted in ("stored", found) or (wanted == "nf4" and found is None):
        return
    if wanted == "nf4":
        raise InvalidInputError(where, f'model.base = "nf4" needs the whole model, but it is {found} in {model}')
    what = f"it is {found}" if found else "its weights are whole"
    make = "trainctl model quantize on the whole model, with" if found else f"trainctl model quantize {model}"
    raise InvalidInputError(
        where,
        f'model.base = "{wanted}", but {what} in {model}: run {make} --to {wanted}, and set model.path to the '
        "directory that it makes",
    )
