"""A model folder for the libraries that load it, and facts from its config.json and the heads of its weight files."""

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainctl.protocol.config import quantization
from trainctl.protocol.config.model_facts import (
    INDEX_FILE,
    SINGLE_FILE,
    check_no_code,
    context_limit,
    stored_tensors,
    weight_files,
)
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.errors import first_line


@contextmanager
def only_the_model(model: Path, config: Mapping[str, Any], *, with_weights: bool = True) -> Iterator[Path]:
    """Yield a temporary folder that has `config` as its config.json and links to the model's own weight files.

    Libraries that load it see nothing else that lies in `model`: no shard of an earlier save, no adapter. Raises
    InvalidInputError as `weight_files` and `check_no_code`.
    """
    check_no_code(config, model, str(model))
    files = weight_files(model) if with_weights else []
    with tempfile.TemporaryDirectory(prefix="trainctl-model-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        for number, file in enumerate(files, 1):
            # mlx-lm reads model*.safetensors.
            link = SINGLE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
            link_or_copy(file, folder / link)
        if len(files) > 1:
            links = {file: link.name for file, link in zip(files, sorted(folder.glob("model-*")), strict=True)}
            placed = {name: links[tensor.file] for name, tensor in stored_tensors(model).items()}
            (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": placed}), encoding="utf-8")
        yield folder


def link_or_copy(file: Path, place: Path) -> None:
    """Link to a file, or copy it where the file system has no links. Raises OSError."""
    try:
        place.symlink_to(file.absolute())
    except OSError:
        shutil.copyfile(file, place)


def vocabulary_size(model: Path) -> int | None:
    """Return how many token ids the model knows, by its config.json; None if that doesn't say."""
    config = model_config(model)
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def longest_context(model: Path) -> int | None:
    """Return the longest sequence in tokens that the model takes; None if it doesn't say. Raises InvalidInputError."""
    return context_limit(model_config(model), stored_shapes(model))


def model_family(model: Path) -> str:
    """Return `model_type` from the model's config.json."""
    return str(model_config(model).get("model_type", ""))


def decoder_start(model: Path) -> int | None:
    """Return the token that an encoder-decoder model's decoder begins with; None of any other model. Raises
    InvalidInputError naming the file."""
    config = model_config(model)
    if not config.get("is_encoder_decoder"):
        return None
    stated = (table.get("decoder_start_token_id") for table in (config, generation_config(model)))
    start = next((token for token in stated if isinstance(token, int)), None)
    if start is None:
        raise InvalidInputError(str(model / "config.json"), "has no decoder_start_token_id, with which decoders begin")
    return start


def generation_config(model: Path) -> dict[str, Any]:
    """Return generation_config.json of a model directory; {} without one. Raises InvalidInputError naming the file."""
    path = model / "generation_config.json"
    return read_object(path, "generation configuration") if path.is_file() else {}


def stored_shapes(model: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name in the directory's files; a packed one's as if it were whole. No
    weight is read. Raises InvalidInputError naming the file."""
    shapes = {name: tensor.shape for name, tensor in stored_tensors(model).items()}
    return quantization.whole_shapes(shapes, model_config(model))


def end_tokens(model: Path) -> tuple[int, ...]:
    """Return the tokens that end a text, by the directory's config.json and generation_config.json."""
    stated = [config.get("eos_token_id") for config in (model_config(model), generation_config(model))]
    return tuple(token for ids in stated if ids is not None for token in (ids if isinstance(ids, list) else [ids]))


def model_config(model: Path) -> dict[str, Any]:
    """Return config.json of a model directory. Raises InvalidInputError naming the file."""
    return read_object(model / "config.json", "model configuration")


def read_object(path: Path, what: str) -> dict[str, Any]:
    """Return the JSON object in a file. Raises InvalidInputError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInputError(str(path), f"cannot read the {what}: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise InvalidInputError(str(path), "not a JSON object")
    return value


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object. Raises OSError."""
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
