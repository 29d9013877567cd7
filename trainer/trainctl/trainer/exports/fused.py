"""The trained model as one Hugging Face directory: adapters added to the base's weights in float32, then cast."""

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.model_facts import INDEX_FILE, SINGLE_FILE, StoredTensor, stored_tensors
from trainctl.protocol.config.quantization import (
    QUANTIZATION_KEYS,
    is_quantized,
    layer_parts,
    quantization_of,
    whole_shapes,
)
from trainctl.trainer.adapters.lora import Lora, stored_name
from trainctl.trainer.common.model_files import model_config
from trainctl.trainer.exports.result_files import float32_file, write_json
from trainctl.trainer.exports.tensor_files import TensorFiles, tensor_files
from trainctl.trainer.exports.trained_model import TrainedModel, copy_tokenizer
from trainctl.trainer.model import rope_config

_OPEN_FILES = 2
"""Files of the base that are held at once: a layer's parts are in one, or in two that follow each other."""
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names in safetensors files, and elsewhere."""


def write_fused(trained: TrainedModel, folder: Path, dtype: str | None) -> str:
    """The model, its tokenizer and template in `folder`, in files as the base's, its weights in `dtype` or as the base
    stores them. Returns the type of most weights. Raises InvalidInputError and OSError."""
    files, stated = tensor_files(), model_config(trained.model)
    base = whole_tensors(stored_tensors(trained.base), stated) if trained.base is not None else {}
    whole = files.as_stored(files.read(trained.weights), trained.model) if trained.lora is None else {}
    adapters = float32_file(trained.weights) if trained.lora is not None else {}
    others = _most_common_type(base.values())
    types, size, placed = Counter[str](), 0, shards([*whole] or [*base], base)
    source: Any = whole or _BaseWeights(files, stored_tensors(trained.model), stated)
    for file, names in placed.items():
        made: dict[str, Any] = {}
        for name in names:
            change = change_of(name, trained.lora, adapters)
            tensor = source[name] if change is None else files.fused(source[name], change)
            kept = _DTYPES.get(base[name].dtype if name in base else others, "float32")
            made[name] = files.cast(tensor, dtype or kept)
            types[dtype or kept] += int(np.prod(tensor.shape))
        size += files.write(folder / file, made)
    if len(placed) > 1:
        write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": _by_name(placed)})
    most = types.most_common(1)[0][0]
    config = rope_config.read(trained.model) | {"dtype": most}
    for key in ("torch_dtype", *QUANTIZATION_KEYS):
        config.pop(key, None)
    write_json(folder / "config.json", config)
    copy_tokenizer(trained, folder)
    return most


def shards(names: Sequence[str], base: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """The weights of each file: those of the base's, and in its first one what it doesn't have."""
    first = min((tensor.file.name for tensor in base.values()), default=SINGLE_FILE)
    placed: dict[str, list[str]] = defaultdict(list)
    for name in names:
        placed[base[name].file.name if name in base else first].append(name)
    return dict(placed) if len(placed) > 1 else {SINGLE_FILE: [*names]}  # one file needs no index, if it has that name


def whole_tensors(stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """What a directory's tensors stand for: a packed weight has the float type of most whole ones."""
    most = _most_common_type(stored.values())
    shapes = whole_shapes({name: tensor.shape for name, tensor in stored.items()}, config)
    kept = {name: tensor.dtype if tensor.dtype in _DTYPES else most for name, tensor in stored.items()}
    return {name: replace(stored[name], shape=shape, dtype=kept[name]) for name, shape in shapes.items()}


def _most_common_type(tensors: Iterable[StoredTensor]) -> str:
    types = Counter(tensor.dtype for tensor in tensors if tensor.dtype in _DTYPES)
    return types.most_common(1)[0][0] if types else "F32"


class _BaseWeights:
    """The weights of a directory as whole ones: the parts of a packed layer may be in several files."""

    def __init__(self, files: TensorFiles, stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> None:
        self._files, self._stored, self._config = files, stored, config
        self._read = functools.lru_cache(_OPEN_FILES)(files.read)

    def __getitem__(self, name: str) -> Any:
        layer = name.removesuffix(".weight")
        if not is_quantized(layer, self._stored):
            return self._tensor(name)
        how = quantization_of(self._config, layer)
        assert how is not None, "whole_shapes has checked it"
        parts = {part: self._tensor(stored) for part, stored in layer_parts(layer, self._stored).items()}
        return self._files.unpacked(how, parts)

    def _tensor(self, name: str) -> Any:
        return self._read(self._stored[name].file)[name]


def change_of(name: str, lora: Lora | None, adapters: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32] | None:
    """What the adapters add to a weight; None: nothing."""
    layer = name.removesuffix(".weight")
    if lora is None or name == layer or layer not in lora.layers:
        return None
    down, up = (adapters[stored_name(layer, matrix)] for matrix in ("A", "B"))
    change: NDArray[np.float32] = np.float32(lora.scale) * (up @ down)
    return change


def _by_name(placed: Mapping[str, Sequence[str]]) -> dict[str, str]:
    return {name: file for file, names in placed.items() for name in names}
