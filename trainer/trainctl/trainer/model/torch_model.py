"""Models of transformers, from a Hugging Face directory."""

import functools
import logging
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainctl.protocol.config.model_facts import weight_files
from trainctl.protocol.config.quantization import quantization_key
from trainctl.protocol.config.run_tables import GradientCheckpointing
from trainctl.protocol.errors import InvalidInputError, check_installed
from trainctl.protocol.machine.large_imports import import_large
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.model_files import only_the_model
from trainctl.trainer.model import rope_config, torch_attention, torch_quantized


@dataclass(frozen=True)
class Nf4:
    """4-bit weights by bitsandbytes, packed as they are loaded (QLoRA, Dettmers et al. 2023)."""

    device: torch.device
    compute_dtype: torch.dtype  # of products with packed weights
    double_quantization: bool  # of the scales too


log = logging.getLogger(__name__)
_NOISE = re.compile(r"drop|jitter_noise")
"""Part of the names of rates: attention_dropout, resid_pdrop, drop_path_rate, layerdrop, router_jitter_noise."""
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


def without_dropout(config: Any) -> tuple[str, ...]:
    """Set all rates of random noise in a configuration of transformers, and in those within it, to 0, and return the
    names of those that were above 0. The library's random numbers depend on micro-batches, ranks and the device, so one
    batch would have another loss each time. `[adapter] dropout` doesn't depend on them, and is the only one."""
    changed: list[str] = []
    for name, value in [*vars(config).items()]:
        if hasattr(value, "to_dict"):
            changed += without_dropout(value)
        elif _NOISE.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            setattr(config, name, type(value)(0))
            changed.append(name)
    return tuple(changed)


def read_model(
    path: Path, where: str, dtype: torch.dtype = torch.float32, *, with_weights: bool = True, packing: Nf4 | None = None
) -> torch.nn.Module:
    """Return the language model in a Hugging Face directory, in `dtype`, its own dropout off; nothing is fetched and no
    code in it is run. Without weights, it has transformers' first values. With `packing`, its linear layers are packed,
    but for the head. Raises InvalidInputError if a weight is missing, of the wrong shape, or the files cannot be
    read."""
    config = rope_config.read(path)
    _import_transformers()
    from safetensors import SafetensorError

    torch_attention.install_masks()
    try:
        with only_the_model(path, config, with_weights=with_weights) as folder:
            whole, loader = _architecture(folder)
            if rates := without_dropout(whole):
                log.warning("the model's own dropout is off (%s); [adapter] dropout is available", ", ".join(rates))
            make: Callable[[], torch.nn.Module] = functools.partial(
                loader.from_config, whole, dtype=dtype, trust_remote_code=False
            )
            if not with_weights:
                return make()
            if quantization_key(config):
                return _quantized(path, config, where, make, dtype)
            model, notes = loader.from_pretrained(
                folder,
                config=whole,
                dtype=dtype,
                local_files_only=True,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                **(_packed_while_loading(packing, where) if packing else {}),
            )
    except (*_LOAD_ERRORS, SafetensorError) as error:
        raise InvalidInputError(f"{where}: model.path", f"cannot load {path}: {first_line(error)}") from None
    _check_complete(notes["missing_keys"], notes["unexpected_keys"], path, where)
    loaded: torch.nn.Module = model
    for parameter in loaded.parameters() if packing else ():
        if parameter.is_floating_point():  # on a CPU part of a mapped file, which would stay in memory
            parameter.data = parameter.data.clone()
    for module in loaded.modules() if packing else ():
        # On a CPU with AVX512-BF16, an evaluation would change 4-bit layers for good to a layout without gradients.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return loaded


def as_stored(tensors: Mapping[str, torch.Tensor], path: Path, where: str) -> dict[str, torch.Tensor]:
    """Return weights of the model in a Hugging Face directory as `save_pretrained` would store them: transformers holds
    those of some families under other names, and the experts of a layer as one tensor. Some may be views of the given
    ones. Raises InvalidInputError."""
    model = _empty_model(path, where)
    from transformers.core_model_loading import revert_weight_conversion

    try:
        stored: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    except _LOAD_ERRORS as error:
        problem = f"transformers cannot store weights of {path} as its family's files do: {first_line(error)}"
        raise InvalidInputError(where, problem) from None
    return stored


def held_names(path: Path, where: str) -> dict[str, str]:
    """Return the names under which transformers holds the weights of the model in a Hugging Face directory, by those
    under which `save_pretrained` stores them. Raises InvalidInputError."""
    held = _empty_model(path, where).state_dict()
    names = [*held]
    numbered = {name: torch.tensor(at, dtype=torch.int32).expand(held[name].shape) for at, name in enumerate(names)}
    stored = as_stored(numbered, path, where)
    return {name: names[int(tensor.flatten()[0])] for name, tensor in stored.items()}


def _empty_model(path: Path, where: str) -> Any:
    """Return a model without memory for its weights. Raises InvalidInputError."""
    _import_transformers()
    try:
        with only_the_model(path, rope_config.read(path), with_weights=False) as folder, torch.device("meta"):
            config, loader = _architecture(folder)
            return loader.from_config(config, trust_remote_code=False)
    except _LOAD_ERRORS as error:
        raise InvalidInputError(where, f"cannot make a model of {path}: {first_line(error)}") from None


def _import_transformers() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import_large("transformers.modeling_utils")
    import transformers

    notices: Any = transformers.utils.logging
    notices.set_verbosity_error()
    notices.disable_progress_bar()


def _architecture(folder: Path) -> tuple[Any, Any]:
    """Return the configuration in a folder and the class that makes a language model of it."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    encodes = config.is_encoder_decoder
    return config, transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM


def _check_complete(missing: Collection[str], unexpected: Collection[str], path: Path, where: str) -> None:
    """Raise InvalidInputError naming a weight that isn't stored, or that is stored without a place in the model. What
    the family declares as needless, such as rotary buffers, transformers has left out of both."""
    if missing:
        raise InvalidInputError(f"{where}: model.path", f"{path} has no weight {min(missing)!r}")
    if unexpected:
        others = f" and {len(unexpected) - 1} more" if len(unexpected) > 1 else ""
        problem = f"{path} holds {min(unexpected)!r}{others}, for which this architecture has no place"
        raise InvalidInputError(f"{where}: model.path", f"{problem}; correct its config.json, or remove the weights")


def _packed_while_loading(packing: Nf4, where: str) -> dict[str, Any]:
    """Return what transformers is asked for. Raises InvalidInputError without bitsandbytes."""
    check_installed("bitsandbytes", "bitsandbytes", f"{where}: model.base", '"nf4"')
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig
    how = make(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=packing.compute_dtype,
        bnb_4bit_use_double_quant=packing.double_quantization,
    )
    return {"quantization_config": how, "device_map": {"": packing.device}}


def _quantized(
    path: Path, config: dict[str, Any], where: str, make: Callable[[], torch.nn.Module], dtype: torch.dtype
) -> torch.nn.Module:
    """Return the model that `make` gives, with the weights in MLX's format in `path`. Raises InvalidInputError for a
    weight that one of them lacks, KeyError for a packed layer that the model lacks, and what reading raises."""
    from accelerate import init_empty_weights
    from safetensors.torch import load_file

    with init_empty_weights():
        model = make()
    stored = {name: tensor for file in weight_files(path) for name, tensor in load_file(file).items()}
    torch_quantized.put_in(model, stored, config, dtype)
    names = dict(model.named_parameters())
    constants = dict(model.named_buffers())
    used = [name for name in stored if name in constants or (name in names and names[name].is_meta)]
    plain = {name: stored.pop(name).to(dtype) for name in used}
    model.load_state_dict(plain, strict=False, assign=True)
    model.tie_weights()  # type: ignore[operator]
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    _check_complete(missing, stored.keys() - names.keys() - constants.keys(), path, where)
    return model


def checkpoint_layers(model: Any, mode: GradientCheckpointing, where: str) -> None:
    """Have decoder layers keep only their input, and be computed again in the backward pass. That trades time for
    memory (Chen et al. 2016) and changes no bit of a gradient. "alternate" applies to every other layer, from the
    first. Raises InvalidInputError for a model that can't do it."""
    if mode == "none":
        return
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        problem = f'this model has no layers to which {mode!r} applies; use "none"'
        raise InvalidInputError(f"{where}: model.gradient_checkpointing", problem)
    for layer in layers[:: 2 if mode == "alternate" else 1]:
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = True
