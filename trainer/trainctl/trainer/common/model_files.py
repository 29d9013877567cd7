"""Facts from a model directory's config.json."""

import json
from pathlib import Path
from typing import Any

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.errors import first_line


def vocabulary_size(model: Path) -> int | None:
    """How many token ids the model knows, by its config.json; None if that doesn't say."""
    config = model_config(model)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def stored_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight by its name in the directory's *.safetensors files; no weight is read. Raises
    InvalidInputError naming the file."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(model.glob("*.safetensors")):
        try:
            with safe_open(path, "numpy") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(str(path), f"not readable weights: {first_line(error)}") from None
    return shapes


def model_config(model: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises InvalidInputError naming the file."""
    path = model / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(str(path), f"cannot read the model configuration: {first_line(error)}") from None
    if not isinstance(config, dict):
        raise InvalidInputError(str(path), "not a JSON object")
    if "quantization" in config or "quantization_config" in config:
        raise InvalidInputError(str(path), "full training of a quantized model is not supported")
    return config
