"""Whether an export is the trained model: its logits in the library it is for, beside those of our own backend.

Both compute in float32 on the CPU, so that the difference is that of the weights and of what the library reads. Where
the export has weights of 16 bits, it is compared with our backend's model after its weights were rounded likewise; what
rounding itself changes is reported beside it. The tolerance is relative to the largest logit where that is above 1.
"""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.model_facts import stored_tensors
from trainctl.protocol.errors import InvalidInputError, check_installed, installing
from trainctl.trainer.adapters import mlx_lora
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.common.model_files import model_config, read_object, vocabulary_size
from trainctl.trainer.data.permutation import mix
from trainctl.trainer.exports.adapter_files import OWN_BASE
from trainctl.trainer.exports.fused import change_of
from trainctl.trainer.exports.quantized import dequantized_weights
from trainctl.trainer.exports.result_files import float32_file
from trainctl.trainer.exports.trained_model import TrainedModel

Form = Literal["peft", "mlx", "fused", "mlx-4bit"]
Logits = NDArray[np.float32]
_TOLERANCE = 1e-5
_ROUNDED = {"F16": "float16", "BF16": "bfloat16"}
"""Types of 16 bits by their names in safetensors files."""
_ROWS, _LENGTH = 2, 32
"""Of the tokens that both are given."""
_WHERE = "--verify"


@dataclass(frozen=True)
class Comparison:
    """Of two models' logits."""

    difference: float  # largest
    tolerance: float
    rounding: float | None = None  # largest difference from the model before rounding; None: nothing was rounded

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


def verify_export(trained: TrainedModel, form: Form, folder: Path) -> Comparison:
    """Load the export in `folder`, and compare. Raises InvalidInputError if a library is missing, or cannot load it."""
    tokens = probe_tokens(vocabulary_size(trained.model) or 2)
    by_mlx = form.startswith("mlx")
    if by_mlx:
        check_installed("mlx-lm", "mlx", _WHERE, f"a comparison of {form}")
    else:
        _check_torch_installed(form)
    pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "peft": (lambda: _torch_model(trained), lambda: _by_peft(folder)),
        "fused": (lambda: _torch_model(trained), lambda: _by_transformers(folder)),
        "mlx": (lambda: _mlx_model(trained), lambda: _by_mlx(folder, trained)),
        "mlx-4bit": (lambda: _dequantized_model(trained, folder), lambda: _by_mlx(folder, None)),
    }
    logits = mlx_logits if by_mlx else torch_logits
    expected, found = (logits(load(), tokens) for load in pairs[form])  # one after another: never both in memory
    if form == "mlx-4bit" or not (types := _rounded(folder)):
        return compare(expected, found)
    if by_mlx:
        return compare(logits(_rounded_mlx_model(trained, types), tokens), found, unrounded=expected)
    whole = compare(expected, logits(_fused_torch_model(trained, {}), tokens))  # what adding the adapters changed
    rounded = compare(logits(_fused_torch_model(trained, types), tokens), found, unrounded=expected)
    return rounded if whole.agrees else replace(whole, rounding=rounded.rounding)


def compare(expected: Logits, found: Logits, *, unrounded: Logits | None = None) -> Comparison:
    """The largest difference; not a number counts as infinite. `unrounded`: of the model before its weights were
    rounded."""
    rounding = None if unrounded is None else _difference(unrounded, found)
    scale = max(1.0, float(np.max(np.abs(expected))))
    return Comparison(_difference(expected, found), _TOLERANCE * scale, rounding)


def _difference(one: Logits, other: Logits) -> float:
    largest = float(np.max(np.abs(one - other)))
    return largest if np.isfinite(largest) else float("inf")


def probe_tokens(vocabulary: int) -> NDArray[np.int64]:
    """The same tokens for the same vocabulary."""
    numbers = mix(np.arange(1, _ROWS * _LENGTH + 1, dtype=np.uint64)) % np.uint64(vocabulary)
    return numbers.astype(np.int64).reshape(_ROWS, _LENGTH)


def torch_logits(model: Any, tokens: NDArray[np.int64]) -> Logits:
    """Of a model of torch, without dropout; a decoder beside an encoder is given the same tokens."""
    import torch

    given = torch.from_numpy(tokens)
    decoder = {"decoder_input_ids": given} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        found: Logits = model.eval()(input_ids=given, use_cache=False, **decoder).logits.float().numpy()
    return found


def mlx_logits(model: Any, tokens: NDArray[np.int64]) -> Logits:
    """Of a model of mlx-lm, in float32 on the CPU."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        model.set_dtype(mx.float32)
        model.eval()
        return np.array(model(mx.array(tokens)).astype(mx.float32))


# ---------------------------------------------------------------- by our own backend


def _torch_model(trained: TrainedModel) -> Any:
    import torch

    from trainctl.trainer.adapters import torch_lora
    from trainctl.trainer.backends.torch_model import read_model

    model = read_model(trained.model, _WHERE)
    if trained.lora is None:
        return model
    model, values = torch_lora.attach(model, trained.lora), float32_file(trained.weights)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.from_numpy(values[torch_lora.stored_name(name)]))
    return model


def _mlx_model(trained: TrainedModel) -> Any:
    import mlx.core as mx

    from trainctl.trainer.backends.mlx_model import read_model

    model = read_model(trained.model, _WHERE, _LENGTH)
    if trained.lora is not None:
        found, values = mlx_lora.attach(model, trained.lora), float32_file(trained.weights)
        turned = ((place, values[name].T if place.transposed else values[name]) for name, place in found.items())
        model.load_weights([(place.name, mx.array(array)) for place, array in turned], strict=False)
    return model


def _fused_torch_model(trained: TrainedModel, types: Mapping[str, str]) -> Any:
    """With the adapters added to its weights, and those in `types` rounded to the type named there."""
    import torch

    from trainctl.trainer.backends import torch_quantized
    from trainctl.trainer.backends.torch_model import read_model

    model = torch_quantized.whole(read_model(trained.model, _WHERE))
    values = float32_file(trained.weights) if trained.lora is not None else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (change := change_of(name, trained.lora, values)) is not None:
                parameter.add_(torch.from_numpy(change))
            if name in types:
                parameter.copy_(parameter.to(getattr(torch, types[name])))
    return model


def _rounded_mlx_model(trained: TrainedModel, types: Mapping[str, str]) -> Any:
    """With the weights in `types` rounded to the type named there."""
    import mlx.core as mx

    from trainctl.trainer.backends.mlx_model import flat

    model = _mlx_model(trained)
    found = ((name, array) for name, array in flat(model.parameters()) if name in types)
    model.load_weights(
        [(name, array.astype(getattr(mx, types[name])).astype(mx.float32)) for name, array in found], strict=False
    )
    return model


def _rounded(folder: Path) -> dict[str, str]:
    """The type of each weight of 16 bits in a directory, by the weight's name."""
    return {name: _ROUNDED[it.dtype] for name, it in stored_tensors(folder).items() if it.dtype in _ROUNDED}


def _dequantized_model(trained: TrainedModel, folder: Path) -> Any:
    from trainctl.trainer.backends.mlx_model import read_model

    model = read_model(trained.model, _WHERE, _LENGTH)
    model.load_weights([*dequantized_weights(folder).items()])
    return model


# ---------------------------------------------------------------- by the library that an export is for


def _by_peft(folder: Path) -> Any:
    import peft
    import torch

    task = read_object(folder / "adapter_config.json", "adapter configuration")["task_type"]
    by_task = {"CAUSAL_LM": peft.AutoPeftModelForCausalLM, "SEQ_2_SEQ_LM": peft.AutoPeftModelForSeq2SeqLM}
    loader: Any = by_task[task]
    return loader.from_pretrained(str(folder), dtype=torch.float32)


def _by_transformers(folder: Path) -> Any:
    import torch
    import transformers

    encodes = model_config(folder).get("is_encoder_decoder")
    loader: Any = transformers.AutoModelForSeq2SeqLM if encodes else transformers.AutoModelForCausalLM
    return loader.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False)


def _by_mlx(folder: Path, trained: TrainedModel | None) -> Any:
    """The model in `folder`; with `trained`, if that has adapters, they are in `folder` and its base beside them."""
    from mlx_lm import utils

    lora: Lora | None = trained.lora if trained is not None else None
    own = folder / OWN_BASE
    base = own if own.exists() else trained.model if trained is not None else folder
    model, _ = utils.load_model(folder if lora is None else base)
    return model if lora is None else utils.load_adapters(model, str(folder))


def _check_torch_installed(form: Form) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    needed = ("torch", "transformers", *(("peft",) if form == "peft" else ()))
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise InvalidInputError(_WHERE, f"a comparison of {form} needs {missing[0]}; {installing('torch')}")
