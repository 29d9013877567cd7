"""The trained model of a run: opened from a checkpoint, with the base of its adapters, and written as the folders that
peft, mlx-lm and transformers open."""

import functools
import importlib.util
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config import run_file
from trainctl.protocol.config.model_facts import (
    INDEX_FILE,
    SINGLE_FILE,
    StoredTensor,
    model_folder,
    reference,
    stored_tensors,
    weight_files,
)
from trainctl.protocol.config.quantization import (
    QUANTIZATION_KEYS,
    Quantization,
    is_quantized,
    layer_parts,
    quantization_of,
    whole_shapes,
)
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.record.checkpoints import best_step, digest_of, listed, verify
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.adapters.lora import Lora, read_lora, stored_name
from trainctl.trainer.adapters.mlx_lora import mlx_config, places
from trainctl.trainer.backends.backend import BackendName
from trainctl.trainer.checkpoints.chunked_tensors import BFLOAT16, DTYPES, write_tensors
from trainctl.trainer.checkpoints.files import ADAPTER, CARRIED_FILES, WEIGHTS, LoopState, is_base, read_loop
from trainctl.trainer.common.model_files import link_or_copy, model_config, read_object, write_object
from trainctl.trainer.model import rope_config

TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's named chat templates; a checkpoint, whose files are in one folder, doesn't have it."""
OWN_BASE = "base"
"""Folder of the base with a config.json for mlx-lm."""
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types of weights, by their names in safetensors files."""
_BLOCK_VALUES = 1 << 24
"""Values that are rounded at once."""

Float32 = NDArray[np.float32]
Weights = Mapping[str, Callable[[], NDArray[Any]]]
"""Weights by name, each read as it is called."""


@dataclass(frozen=True)
class TrainedModel:
    """One checkpoint, whose files are as they were written."""

    config: RunFile  # its model.path is `base`, where that was found
    checkpoint: Path
    loop: LoopState
    lora: Lora | None  # None: all weights were trained
    base: Path | None  # model that training began with; None: gone, which only adapters need
    backend: BackendName  # that wrote the checkpoint

    @property
    def model(self) -> Path:
        """The Hugging Face directory that has the model's configuration: the base of adapters, or the checkpoint."""
        return self.base if self.lora is not None and self.base is not None else self.checkpoint

    @property
    def weights(self) -> Path:
        """The file of the trained values, in float32."""
        return self.checkpoint / (WEIGHTS if self.lora is None else ADAPTER)

    def adapters(self) -> dict[str, Float32]:
        """Return the matrices of the adapters by peft's names; {} if all weights were trained."""
        from safetensors.numpy import load_file

        arrays: dict[str, Float32] = load_file(self.weights) if self.lora is not None else {}
        return arrays

    def change_of(self, name: str, adapters: Mapping[str, Float32]) -> Float32 | None:
        """Return what the adapters add to a weight; None: nothing."""
        layer = name.removesuffix(".weight")
        if self.lora is None or name == layer or layer not in self.lora.layers:
            return None
        down, up = (adapters[stored_name(layer, matrix)] for matrix in ("A", "B"))
        change: Float32 = np.float32(self.lora.scale) * (up @ down)
        return change


def open_trained(paths: RunPaths, step: int | None, best: bool, evaluations: Sequence[Evaluation]) -> TrainedModel:
    """Return the checkpoint of `step`, or that with the lowest held-out loss (`best`), or the newest. Raises
    InvalidInputError if there is none, its files were altered, or the base of its adapters isn't here any more."""
    folder = _checkpoint(paths, step, best, evaluations)
    loop, config = read_loop(folder), run_file.read(paths.run_file)
    base, lora = _base(config, loop, folder, str(paths.run_file))
    if base is not None:
        config = on_base(config, base)
    manifest = verify(folder, hashes=False)
    library = manifest.metadata.environment.library if manifest.metadata is not None else ""
    trained = TrainedModel(config, folder, loop, lora, base, "mlx" if library.startswith("mlx") else "torch")
    if digest_of(trained.weights) != manifest.files[trained.weights.name].sha256:
        raise InvalidInputError(str(trained.weights), "altered: it does not match its SHA-256; use another --step")
    return trained


def on_base(config: RunFile, base: Path) -> RunFile:
    """Return a run file whose model is the one in the folder `base`."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(base)))


def _checkpoint(paths: RunPaths, step: int | None, best: bool, evaluations: Sequence[Evaluation]) -> Path:
    complete: dict[int, Path] = {}
    for folder in listed(paths.checkpoints):  # newest first
        try:
            complete[verify(folder, hashes=False).step] = folder
        except InvalidInputError:
            continue
    if not complete:
        problem = "no complete checkpoint on this machine: export on the node that wrote it"
        raise InvalidInputError(str(paths.checkpoints), problem)
    steps = ", ".join(map(str, complete))
    if best and (step := best_step(complete, evaluations)) is None:
        problem = f"there is no best checkpoint: none was evaluated ({steps}); choose one with --step N"
        raise InvalidInputError("--best", problem)
    if step is not None and step not in complete:
        raise InvalidInputError("--step", f"no complete checkpoint of step {step}; there is one of {steps}")
    return complete[step] if step is not None else next(iter(complete.values()))


def _base(config: RunFile, loop: LoopState, checkpoint: Path, where: str) -> tuple[Path | None, Lora | None]:
    """Return the base that the adapters were trained on, which may be at another path here than on the node that wrote
    the checkpoint; and the adapters."""
    named: list[tuple[str | None, str | None]] = [(config.model.path, None)]
    named += [(node.model_path, None) for node in config.nodes.values()]
    if config.adapter.kind != "full":
        stated = read_object(checkpoint / "adapter_config.json", "adapter configuration")
        named.insert(0, (stated.get("base_model_name_or_path"), stated.get("revision")))
    likely = dict.fromkeys(model_folder(path, revision) for path, revision in named if path)
    here = [path for path in likely if (path / "config.json").is_file()]
    if config.adapter.kind == "full":
        return next(iter(here), None), None
    for path in here:
        lora = read_lora(on_base(config, path), where)
        if is_base(path, lora, loop.base_digest):
            return path, lora
    if here:
        raise InvalidInputError(str(here[0]), "not the model that the adapters were trained on: its files differ")
    raise InvalidInputError(config.model.path, "the base model of the adapters is gone: put it back there")


# ---------------------------------------------------------------- as adapters


def write_peft(trained: TrainedModel, lora: Lora, folder: Path) -> None:
    """Write peft's directory: as a checkpoint has it, with the base's id on the hub, or its path on this machine.
    Raises OSError."""
    shutil.copyfile(trained.weights, folder / ADAPTER)
    write_object(folder / "adapter_config.json", lora.peft_config(Path(trained.config.model.path)))
    copy_carried(folder, trained.checkpoint, trained.base)


def write_mlx(trained: TrainedModel, lora: Lora, folder: Path) -> None:
    """Write mlx-lm's directory, whose matrices are the transposes of peft's. If mlx-lm would misread the base, the
    folder `OWN_BASE` in it has a base that mlx-lm reads correctly. Raises OSError."""
    from safetensors.numpy import save_file

    adapters = trained.adapters()
    arrays = {}
    for name, place in places(lora).items():
        arrays[place.name] = np.ascontiguousarray(adapters[name].T if place.transposed else adapters[name])
    save_file(arrays, folder / "adapters.safetensors", metadata={"format": "mlx"})
    base = {"model": reference(Path(trained.config.model.path)).name}
    write_object(folder / "adapter_config.json", mlx_config(lora) | base)
    if not rope_config.mlx_reads(trained.model):
        own = folder / OWN_BASE
        own.mkdir()
        write_object(own / "config.json", rope_config.read(trained.model))
        for name in (*(path.name for path in weight_files(trained.model)), INDEX_FILE):
            if (trained.model / name).is_file():
                link_or_copy(trained.model / name, own / name)
        copy_carried(own, trained.model)


def copy_carried(folder: Path, source: Path, base: Path | None = None) -> None:
    """Copy the files of the tokenizer, the chat template and generation, and the named chat templates, which may be
    in `base` alone. Raises OSError."""
    for name in CARRIED_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (templates := (base or source) / TEMPLATES).is_dir():
        shutil.copytree(templates, folder / TEMPLATES)


# ---------------------------------------------------------------- as a whole model


def write_fused(trained: TrainedModel, folder: Path, dtype: str | None) -> str:
    """Write a Hugging Face directory, in files as the base's: the adapters are added to the base's weights in float32,
    which are then cast to `dtype`, or to the types that the base stores. Returns the type of most weights. Raises
    InvalidInputError and OSError.

    (peft merges a whole model in memory, and none of a packed base; mlx-lm rounds what it adds to the base's type
    before it adds it, and stores what it has read under names of its own.)
    """
    base = stored_tensors(trained.base) if trained.base is not None else {}
    likely = Counter(tensor.dtype for tensor in base.values() if tensor.dtype in FLOATS)
    most_likely = likely.most_common(1)[0][0] if likely else "F32"
    weights = _trained_weights(trained) if trained.lora is None else whole_weights(trained.model, base)
    adapters, types, size = trained.adapters(), Counter[str](), 0
    first = min((tensor.file.name for tensor in base.values()), default=SINGLE_FILE)  # for what the base doesn't have
    placed: dict[str, list[str]] = defaultdict(list)
    for name in weights:
        placed[base[name].file.name if name in base else first].append(name)
    if len(placed) == 1:  # one file needs no index, if it has that name
        placed = {SINGLE_FILE: [*weights]}
    for file, names in placed.items():
        arrays: dict[str, NDArray[Any]] = {}
        for name in names:
            array, change = weights[name](), trained.change_of(name, adapters)
            if change is not None:
                array = widened(array) + change
            stored = base[name].dtype if name in base else most_likely
            kind = dtype or FLOATS.get(stored, FLOATS[most_likely])
            types[kind] += array.size
            arrays[name] = _cast(array, kind)
            size += arrays[name].nbytes
        write_tensors(folder / file, arrays, lambda _: None)
    if len(placed) > 1:
        by_name = {name: file for file, names in placed.items() for name in names}
        write_object(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": by_name})
    most = types.most_common(1)[0][0]
    config = rope_config.read(trained.model) | {"dtype": most}
    for key in ("torch_dtype", *QUANTIZATION_KEYS):
        config.pop(key, None)
    write_object(folder / "config.json", config)
    copy_carried(folder, trained.checkpoint, trained.base)
    return most


def has_torch() -> bool:
    """Return whether torch is installed; else MLX unpacks weights."""
    return importlib.util.find_spec("torch") is not None


def _trained_weights(trained: TrainedModel) -> Weights:
    """Return the weights of a checkpoint under the names and in the shapes that the files of their family have."""
    if has_torch():
        from safetensors.torch import load_file

        from trainctl.trainer.model.torch_model import as_stored

        stored = as_stored(load_file(trained.weights), trained.model, "--to")
        return {name: functools.partial(np.asarray, tensor) for name, tensor in stored.items()}
    tensors = stored_tensors(trained.checkpoint)
    if stacked := sorted(name for name, tensor in tensors.items() if ".experts." in name and len(tensor.shape) > 2):
        problem = f"{stacked[0]!r} holds all experts of a layer, which only transformers can take apart"
        raise InvalidInputError("--to", f"{problem}; {installing('torch')}, or export where torch is installed")
    return {name: functools.partial(_read_tensor, tensor) for name, tensor in tensors.items()}


def whole_weights(model: Path, stored: Mapping[str, StoredTensor]) -> Weights:
    """Return the weights of a directory as whole ones: the parts of a packed layer may be in several files."""
    config = model_config(model)

    def weight(name: str) -> NDArray[Any]:
        layer = name.removesuffix(".weight")
        if not is_quantized(layer, stored):
            return _read_tensor(stored[name])
        how = quantization_of(config, layer)
        assert how is not None, "whole_shapes has checked it"
        parts = {part: _read_tensor(stored[key]) for part, key in layer_parts(layer, stored).items()}
        return _unpacked(how, {part: np.array(widened(array)) for part, array in parts.items()})

    shapes = whole_shapes({name: tensor.shape for name, tensor in stored.items()}, config)
    return {name: functools.partial(weight, name) for name in shapes}


def _unpacked(how: Quantization, parts: Mapping[str, NDArray[Any]]) -> Float32:
    """Return the weight of a quantized layer. Raises InvalidInputError without a library that can."""
    if has_torch():
        import torch

        from trainctl.trainer.model.torch_quantized import packed, unpack

        tensors = {part: torch.from_numpy(array) for part, array in parts.items()}
        weight: Float32 = unpack(packed(how, tensors), torch.float32).numpy()
        return weight
    if importlib.util.find_spec("mlx") is None:
        raise InvalidInputError("--to", f"fused weights need torch or mlx; {installing('torch', 'mlx')}")
    import mlx.core as mx

    arrays: dict[str, Any] = {part: mx.array(array) for part, array in parts.items()}
    layout = (how.group_size, how.bits, how.mode)
    return np.array(mx.dequantize(arrays["weight"], arrays["scales"], arrays.get("biases"), *layout, dtype=mx.float32))


def _read_tensor(tensor: StoredTensor) -> NDArray[Any]:
    """Return the values of a file, loaded as they are used. Raises InvalidInputError."""
    if tensor.dtype not in DTYPES:
        raise InvalidInputError(str(tensor.file), f"holds values of the type {tensor.dtype}, which no export takes")
    size = tensor.end - tensor.start
    raw = np.memmap(tensor.file, np.uint8, "r", tensor.start, (size,)) if size else np.empty(0, np.uint8)
    return np.asarray(raw).view(DTYPES[tensor.dtype]).reshape(tensor.shape)


def _is_float(array: NDArray[Any]) -> bool:
    return array.dtype == BFLOAT16 or array.dtype.kind == "f"


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """Return an array in float32; integers as they are."""
    if array.dtype == BFLOAT16:
        return (array.view("<u2").astype("<u4") << 16).view("<f4")
    return array.astype(np.float32, copy=False) if _is_float(array) else array


def _cast(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Return an array in a float type by its name; integers as they are."""
    if not _is_float(array) or array.dtype == (BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype)):
        return array
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):  # it is infinite
            return widened(array).astype(dtype)
    bits = np.ascontiguousarray(widened(array)).reshape(-1).view("<u4")
    rounded = np.empty(bits.size, "<u2")
    for start in range(0, bits.size, _BLOCK_VALUES):
        block = bits[start : start + _BLOCK_VALUES]
        to_even = (block + (0x7FFF + ((block >> 16) & 1))) >> 16
        is_nan = (block & 0x7FFFFFFF) > 0x7F800000
        rounded[start : start + _BLOCK_VALUES] = np.where(is_nan, 0x7FC0, to_even)
    return rounded.view(BFLOAT16).reshape(array.shape)
