"""The trained model as one Hugging Face directory: adapters added to the base's weights in float32, then cast."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.quantization import QUANTIZATION_KEYS, whole_shapes
from trainctl.trainer.adapters.lora import Lora, stored_name
from trainctl.trainer.backends import rope_config
from trainctl.trainer.common.model_files import StoredTensor, model_config, stored_tensors
from trainctl.trainer.exports.quantized import whole_weights
from trainctl.trainer.exports.result_files import float32_file, write_json
from trainctl.trainer.exports.tensor_files import TensorFiles, tensor_files
from trainctl.trainer.exports.trained_model import TrainedModel, copy_tokenizer

_ONLY_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Names in safetensors files, and elsewhere."""


def write_fused(trained: TrainedModel, folder: Path, dtype: str | None) -> str:
    """The model, its tokenizer and template in `folder`, in files as the base's, its weights in `dtype` or as the base
    stores them. Returns the type of most weights. Raises InvalidInputError and OSError."""
    files, stated = tensor_files(), model_config(trained.model)
    base = whole_tensors(stored_tensors(trained.base), stated) if trained.base is not None else {}
    whole = files.read(trained.weights) if trained.lora is None else {}
    adapters = float32_file(trained.weights) if trained.lora is not None else {}
    types, size, placed = Counter[str](), 0, shards([*whole] or [*base], base)
    for file, names in placed.items():
        source = whole or _whole(files, files.read(trained.model / file), stated)
        made: dict[str, Any] = {}
        for name in names:
            change = change_of(name, trained.lora, adapters)
            tensor = source[name] if change is None else files.fused(source[name], change)
            kept = _DTYPES.get(base[name].dtype, "float32") if name in base else "float32"
            made[name] = files.cast(tensor, dtype or kept)
            types[dtype or kept] += int(np.prod(tensor.shape))
        size += files.write(folder / file, made)
    if len(placed) > 1:
        write_json(folder / _INDEX, {"metadata": {"total_size": size}, "weight_map": _by_name(placed)})
    most = types.most_common(1)[0][0]
    config = rope_config.read(trained.model) | {"dtype": most}
    for key in ("torch_dtype", *QUANTIZATION_KEYS):
        config.pop(key, None)
    write_json(folder / "config.json", config)
    copy_tokenizer(trained, folder)
    return most


def shards(names: Sequence[str], base: Mapping[str, StoredTensor]) -> dict[str, list[str]]:
    """The weights of each file: those of the base's, and in its first one what it doesn't have."""
    first = min((tensor.file for tensor in base.values()), default=_ONLY_FILE)
    placed: dict[str, list[str]] = defaultdict(list)
    for name in names:
        placed[base[name].file if name in base else first].append(name)
    return dict(placed)


def whole_tensors(stored: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """What a directory's tensors stand for: a packed weight has the float type of most whole ones."""
    types = Counter(tensor.dtype for tensor in stored.values() if tensor.dtype in _DTYPES)
    most = types.most_common(1)[0][0] if types else "F32"
    shapes = whole_shapes({name: tensor.shape for name, tensor in stored.items()}, config)
    kept = {name: tensor.dtype if tensor.dtype in _DTYPES else most for name, tensor in stored.items()}
    return {name: stored[name]._replace(shape=shape, dtype=kept[name]) for name, shape in shapes.items()}


def _whole(files: TensorFiles, source: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The weights in a file, packed ones unpacked. All parts of a layer are in one file."""
    return {
        name: parts["weight"] if how is None else files.unpacked(how, parts)
        for name, how, parts in whole_weights(source, config)
    }


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
