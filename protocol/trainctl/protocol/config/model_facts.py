"""Facts from a model directory's config.json and the heads of its weight files, read without a tensor library, and the
models of the Hugging Face cache.

The layout of weight files is that of https://github.com/huggingface/safetensors#format.
"""

import functools
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config import input_checks, quantization
from trainctl.protocol.config.input_checks import is_whole_numbers, json_object, reason
from trainctl.protocol.errors import InvalidInputError, NotCachedError, installing

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_LIMIT_BYTES = 100_000_000
"""Most bytes of a header, as the format says."""
_LENGTH_BYTES = 8
_COMPARED_BYTES = 1 << 22
"""Bytes of two tensors that are compared at a time."""
HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight", "shared.weight")
_LIMITS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_source_positions",
    "seq_length",
    "max_seq_len",
    "model_max_length",
)
"""Keys of config.json under which families state their longest sequence."""
_POSITION_TABLES = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")


class ModelFacts(NamedTuple):
    """A language model's size."""

    family: str  # `model_type`
    shapes: Mapping[str, tuple[int, ...]]  # of each weight by its stored name; a tied head isn't there twice.
    # Without weight files: of a Llama's matrices
    width: int  # of hidden states
    intermediate: int  # width of the feed-forward layers
    layers: int  # of an encoder-decoder model: those of both
    heads: int
    vocabulary: int
    positions: int | None = None  # longest sequence that it was made for, where it says so
    quantized: Mapping[str, int] = {}  # bytes of each weight that is stored packed
    crossing: int = 0  # layers that also attend to an encoder's states
    router_loss: float = 0.0  # weight of a mixture's balancing loss by its configuration


def read_facts(model: Path, where: str) -> ModelFacts | None:
    """Return the facts of a model in a Hugging Face directory; None if its configuration doesn't state these sizes.
    Raises InvalidInputError blaming `where`, for a file that cannot be read."""
    input_checks.check_json(model / "config.json", where)
    whole: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
    tensors = stored_tensors(model, where)
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    if whole.get("is_encoder_decoder"):
        return _encoder_decoder(whole, stored, has_own_head(tensors))
    sizes: list[Any] = [
        config.get(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    shapes = quantization.whole_shapes(stored, whole) or _matrices(config, *sizes)
    is_tied = config.get("tie_word_embeddings", False) and not has_own_head(tensors)
    if is_tied and "model.embed_tokens.weight" in shapes:
        shapes.pop("lm_head.weight", None)
    stated = config.get("intermediate_size")
    intermediate = stated if isinstance(stated, int) else 4 * sizes[0]
    positions = context_limit(config, stored)
    width, layers, heads, vocabulary = sizes
    family = str(whole.get("model_type", ""))
    quantized = quantization.quantized_bytes(stored)
    stated_weight = config.get("router_aux_loss_coef")
    router_loss = float(stated_weight) if isinstance(stated_weight, int | float) else 0.0
    return ModelFacts(
        family, shapes, width, intermediate, layers, heads, vocabulary, positions, quantized, router_loss=router_loss
    )


def check_no_code(config: Mapping[str, Any], model: Path, where: str) -> None:
    """Raise InvalidInputError for a model whose configuration names Python code that mlx-lm would run. (Code named by
    `auto_map` is run by transformers only if asked to, which trainctl never does.)"""
    if config.get("model_file") is not None:
        problem = (
            f"{model / 'config.json'} names code of its own, model_file = {config['model_file']!r}, which trainctl"
        )
        raise InvalidInputError(where, f"{problem} doesn't run; use a model of an architecture that the libraries have")


def context_limit(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] = {}) -> int | None:
    """Return the longest sequence in tokens that a model takes, by its configuration and by the rows of its table of
    learned positions; None if neither states one. Models with relative positions alone, such as T5, have no limit."""
    if "relative_attention_num_buckets" in config:
        return None
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    limits = [value for part in (config, text) for key in _LIMITS if isinstance(value := part.get(key), int)]
    limits += [shape[0] for name, shape in shapes.items() if name.endswith(_POSITION_TABLES)]
    return min((limit for limit in limits if limit > 0), default=None)


def _encoder_decoder(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], own_head: bool) -> ModelFacts | None:
    """Return the facts by the names of T5 and BART, of which both have a matrix of embeddings under three names."""
    encoder = _first(config, "encoder_layers", "num_layers")
    decoder = _first(config, "decoder_layers", "num_decoder_layers") or encoder
    width, vocabulary = _first(config, "d_model"), _first(config, "vocab_size")
    heads = _first(config, "encoder_attention_heads", "num_heads")
    if not (encoder and decoder and width and vocabulary and heads):
        return None
    shared = {f"{half}.embed_tokens.weight" for half in ("encoder", "decoder", "model.encoder", "model.decoder")}
    is_tied = config.get("tie_word_embeddings", True) and not own_head
    tied = shared | ({"lm_head.weight"} if is_tied else set())
    own = {name: shape for name, shape in shapes.items() if name not in tied}
    inner = max(_first(config, key) or 0 for key in ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim")) or 4 * width
    return ModelFacts(
        str(config.get("model_type", "")),
        own,
        width,
        inner,
        encoder + decoder,
        heads,
        vocabulary,
        context_limit(config, shapes),
        crossing=decoder,
    )


def _first(config: dict[str, Any], *keys: str) -> int | None:
    """The first of these values that is a whole number above 0."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def _matrices(
    config: dict[str, Any], width: int, layers: int, heads: int, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """Return the matrices of a Llama of these sizes."""
    inner, groups = config.get("intermediate_size", 4 * width), config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (vocabulary, width)
    for layer in (f"model.layers.{number}" for number in range(layers)):
        found |= {
            f"{layer}.self_attn.{name}_proj.weight": (head * count, width)
            for name, count in (("q", heads), ("k", groups), ("v", groups))
        }
        found[f"{layer}.self_attn.o_proj.weight"] = (width, head * heads)
        found |= {f"{layer}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
    return found


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the header of a safetensors file describes it."""

    file: Path
    dtype: str  # such as "F32"
    shape: tuple[int, ...]
    start: int  # first byte of its data in the file
    end: int  # the byte after its last one


def weight_files(model: Path, where: str = "") -> list[Path]:
    """Return the files of a model's weights: those that its index names, else model.safetensors, else none. Other files
    in the folder belong to an earlier save or to another program.

    Raises InvalidInputError, blaming `where` or the folder, if the index is unusable or names a missing file, or if
    model.safetensors lies beside the index of other files, of which libraries read either.
    """
    blamed, index, single = where or str(model), model / INDEX_FILE, model / SINGLE_FILE
    if not index.is_file():
        return [single] if single.is_file() else []
    try:
        named = json_object(index.read_bytes()).get("weight_map")
    except (OSError, ValueError) as error:
        raise InvalidInputError(blamed, f"{index} is not a JSON object: {reason(error)}") from None
    if not isinstance(named, dict) or not named or not all(isinstance(name, str) for name in named.values()):
        raise InvalidInputError(blamed, f"{index} has no weight_map from tensors to files")
    names = sorted(set(named.values()))
    for name in names:
        if Path(name).name != name:
            raise InvalidInputError(blamed, f"{index} names {name!r}, which is not the name of a file beside it")
        if not (model / name).is_file():
            raise InvalidInputError(blamed, f"{index} names {name}, which is missing")
    if single.is_file() and SINGLE_FILE not in names:
        problem = f"holds both {SINGLE_FILE} and {INDEX_FILE} of other files; remove those that aren't the model"
        raise InvalidInputError(blamed, f"{model} {problem}")
    return [model / name for name in names]


def stored_tensors(model: Path, where: str = "") -> dict[str, StoredTensor]:
    """Return a model's stored tensors by name. Raises InvalidInputError as `weight_files`, and for a damaged file or a
    tensor that two files hold."""
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(model, where):
        for name, tensor in _read_header(file, where or str(file)).items():
            if name in tensors:
                problem = f"{name!r} is in both {tensors[name].file.name} and {file.name} of {model}; keep one"
                raise InvalidInputError(where or str(model), problem)
            tensors[name] = tensor
    return tensors


def has_own_head(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether the stored output head differs from the stored input embeddings, whatever config.json says about
    tied weights. transformers decides likewise when it loads them. Raises OSError."""
    head = next((tensors[name] for name in tensors if name.endswith(HEADS)), None)
    embeddings = next((tensors[name] for name in tensors if name.endswith(_EMBEDDINGS)), None)
    return head is not None and embeddings is not None and _differ(head, embeddings)


@functools.lru_cache(maxsize=16)
def _differ(left: StoredTensor, right: StoredTensor) -> bool:
    size = left.end - left.start
    if (left.dtype, left.shape, size) != (right.dtype, right.shape, right.end - right.start):
        return True
    with left.file.open("rb") as left_file, right.file.open("rb") as right_file:
        left_file.seek(left.start)
        right_file.seek(right.start)
        for done in range(0, size, _COMPARED_BYTES):
            count = min(_COMPARED_BYTES, size - done)
            if left_file.read(count) != right_file.read(count):
                return True
    return False


def _read_header(path: Path, where: str) -> dict[str, StoredTensor]:
    """Return the tensors of a safetensors file. Raises InvalidInputError unless it has 8 bytes of little-endian length,
    that much JSON, and all data that this lists."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or not 2 <= length <= min(HEADER_LIMIT_BYTES, size - _LENGTH_BYTES):
                raise ValueError("its first 8 bytes are not a valid header length")
            header = json_object(file.read(length))
        begin = _LENGTH_BYTES + length
        tensors = {name: _tensor(path, entry, begin) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError) as error:
        raise InvalidInputError(where, f"{path} is not a safetensors file: {reason(error)}") from None
    needed = max((tensor.end for tensor in tensors.values()), default=begin)
    if size < needed:
        raise InvalidInputError(where, f"{path} is truncated: it has {size:,} bytes, but its header lists {needed:,}")
    return tensors


def _tensor(path: Path, entry: Any, begin: int) -> StoredTensor:
    offsets, shape = (entry.get(key) if isinstance(entry, dict) else None for key in ("data_offsets", "shape"))
    if not is_whole_numbers(offsets) or len(offsets) != 2:
        raise ValueError("data_offsets must be two whole numbers")
    if not is_whole_numbers(shape):
        raise ValueError("a tensor has no shape")
    return StoredTensor(path, str(entry.get("dtype")), tuple(shape), begin + offsets[0], begin + offsets[1])


_ID = re.compile(r"\b[\w\-.]+\b/\b[\w\-.]{1,96}\b", re.ASCII)
"""huggingface_hub's own pattern, with the organisation required."""
_CACHED = re.compile(r"^models--(?P<owner>.+?)--(?P<name>.+)$")
"""Folder of a model in the Hugging Face cache."""
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_hub_id(path: str) -> bool:
    """Return whether `path` has the form `org/name`."""
    return _ID.fullmatch(path) is not None and "--" not in path and ".." not in path


@dataclass(frozen=True)
class Reference:
    """The name by which other machines know a model."""

    name: str  # id on the hub, or a path
    revision: str | None = None  # commit on the hub, where it is known


def reference(model: Path) -> Reference:
    """Return the reference of a model's directory: id and commit if it is in a Hugging Face cache, else its path."""
    found = ((_CACHED.match(part), place) for place, part in enumerate(model.parts))
    match, place = next(((match, place) for match, place in found if match), (None, 0))
    if match is None:
        return Reference(str(model))
    after = model.parts[place + 1 :]
    revision = after[1] if len(after) == 2 and after[0] == "snapshots" and _COMMIT.fullmatch(after[1]) else None
    return Reference(f"{match['owner']}/{match['name']}", revision)


def model_folder(path: str, revision: str | None = None) -> Path:
    """Return the cached folder of the model with that id, of its main branch or of a commit; `path` itself if it is a
    folder, isn't an id or isn't cached."""
    if _is_folder(path) or not is_hub_id(path) or importlib.util.find_spec("huggingface_hub") is None:
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return Path(path)


def check_cached(path: str, where: str) -> None:
    """Raise NotCachedError, blaming `where`, for the id of a model that isn't cached on this machine, or
    InvalidInputError if the library that reads the cache isn't installed."""
    if _is_folder(path) or not is_hub_id(path) or model_folder(path) != Path(path):
        return
    if importlib.util.find_spec("huggingface_hub") is None:
        problem = f"{path} is a Hugging Face id, which needs huggingface_hub here; {installing('torch', 'mlx')}"
        raise InvalidInputError(where, problem)
    raise NotCachedError(where, path)


def _is_folder(path: str) -> bool:
    return os.path.isdir(path)  # noqa: PTH112  a Path's `is_dir` raises for a name that is too long
