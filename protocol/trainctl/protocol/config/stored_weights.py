"""A model folder's weight files: which they are, and what their headers say. No tensor library is needed.

The layout of the files is that of https://github.com/huggingface/safetensors#format.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.protocol.config.input_checks import is_whole_numbers, json_object, reason
from trainctl.protocol.errors import InvalidInputError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_LIMIT_BYTES = 100_000_000
"""Most bytes of a header, as the format says."""
_LENGTH_BYTES = 8
_COMPARED_BYTES = 1 << 22
"""Bytes of two tensors that are compared at a time."""
HEADS = ("lm_head.weight", "embed_out.weight")
_EMBEDDINGS = ("embed_tokens.weight", "embed_in.weight", "wte.weight", "word_embeddings.weight", "shared.weight")


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
