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
