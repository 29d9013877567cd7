"""Facts from a model directory's config.json and the heads of its weight files."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config import quantization
from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.errors import first_line


def vocabulary_size(model: Path) -> int | None:
    """How many token ids the model knows, by its config.json; None if that doesn't say."""
    config = model_config(model)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def longest_context(model: Path) -> int | None:
    """Tokens that the model allows, by its config.json; None if that doesn't say."""
    config = model_config(model)
    limit = config.get("max_position_embeddings", config.get("text_config", {}).get("max_position_embeddings"))
    return limit if isinstance(limit, int) else None


def model_family(model: Path) -> str:
    """`model_type` from the model's config.json."""
    return str(model_config(model).get("model_type", ""))


def decoder_start(model: Path) -> int | None:
    """The token that an encoder-decoder model's decoder begins with; None of any other model. Raises InvalidInputError
    naming the file."""
    config = model_config(model)
    if not config.get("is_encoder_decoder"):
        return None
    found = (named.get("decoder_start_token_id") for named in (config, generation_config(model)))
    start = next((token for token in found if isinstance(token, int)), None)
    if start is None:
        raise InvalidInputError(str(model / "config.json"), "has no decoder_start_token_id, with which decoders begin")
    return start


def generation_config(model: Path) -> dict[str, Any]:
    """generation_config.json of a model directory; {} without one. Raises InvalidInputError naming the file."""
    path = model / "generation_config.json"
    return read_object(path, "generation configuration") if path.is_file() else {}


def stored_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each weight by its name in the directory's files; a packed one's as if it were whole. No weight is
    read. Raises InvalidInputError naming the file."""
    shapes = {name: tensor.shape for name, tensor in stored_tensors(model).items()}
    return quantization.whole_shapes(shapes, model_config(model))


class StoredTensor(NamedTuple):
    """What a safetensors file says of one of its tensors."""

    file: str
    shape: tuple[int, ...]
    dtype: str  # such as "F32"


def stored_tensors(model: Path) -> dict[str, StoredTensor]:
    """Those of a directory's weight files, by name. Raises InvalidInputError naming the file."""
    from safetensors import SafetensorError, safe_open

    found: dict[str, StoredTensor] = {}
    for path in weight_files(model):
        try:
            with safe_open(path, "numpy") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    found[name] = StoredTensor(path.name, tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise InvalidInputError(str(path), f"not readable weights: {first_line(error)}") from None
    return found


def end_tokens(model: Path) -> tuple[int, ...]:
    """The tokens that end a text, by the directory's config.json and generation_config.json."""
    found = [config.get("eos_token_id") for config in (model_config(model), generation_config(model))]
    return tuple(token for ids in found if ids is not None for token in (ids if isinstance(ids, list) else [ids]))


def model_config(model: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises InvalidInputError naming the file."""
    return read_object(model / "config.json", "model configuration")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. Raises InvalidInputError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError(str(path), f"cannot read the {what}: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise InvalidInputError(str(path), "not a JSON object")
    return value
