"""A comparison of an export with the trained model: its logits in the library that it is for, beside those that the
backend that trained it computes from the checkpoint.

Both compute in float32 on the CPU, so that the difference is that of the weights and of what the library reads. Where
the export has weights of 16 bits, it is compared with the model after its weights were rounded likewise; what rounding
itself changes is reported beside it. A quantized export is compared with the values that it stands for, and the whole
model that it was made from with the checkpoint. Two libraries add in different orders, and deep models amplify that: so
the tolerance is a multiple of what a change of the lowest bits makes of the reference.
"""

import importlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.model_facts import check_no_code, stored_tensors
from trainctl.protocol.errors import installing
from trainctl.trainer.common.errors import opened_by
from trainctl.trainer.common.model_files import model_config, read_object, vocabulary_size
from trainctl.trainer.data.permutation import mix
from trainctl.trainer.exports.trained_model import FLOATS, OWN_BASE, TrainedModel, whole_weights, widened

Form = Literal["peft", "mlx", "fused", "mlx-4bit"]
Logits = NDArray[np.float32]
Tokens = NDArray[np.int64]
_MIN_ALLOWED, _MAX_ALLOWED, _TIMES_NOISE = 1e-5, 1e-3, 20
"""Differences, relative to the largest logit where that is above 1; and how many times the model's own noise."""
_LOWEST_BIT = 1
_ROWS, _LENGTH = 2, 32
"""Shape of the tokens that both are given."""
_WHERE = "verification"


@dataclass(frozen=True)
class Reference:
    """The logits of the model that was trained, for some tokens."""

    tokens: Tokens
    logits: Logits
    noise: float  # by which they change if the inputs of linear layers are moved by one unit in their last place


@dataclass(frozen=True)
class Comparison:
    """The differences of two models' logits."""

    difference: float  # largest
    tolerance: float
    rounding: float | None = None  # largest difference from the model before rounding; None: nothing was rounded
    library: float | None = None  # by which the library's own logits differ, of a family that it computes otherwise

    @property
    def agrees(self) -> bool:
        return self.difference <= self.tolerance


def unverifiable(trained: TrainedModel, form: Form) -> str:
    """Return why an export of a trained model can't be compared here; "" if it can. Both the library that it is for and
    the one that trained it are needed."""
    torch = ("torch", "transformers", *(("peft",) if trained.lora is not None else ()))
    for_export = torch if form in ("peft", "fused") else ("mlx", "mlx_lm")
    for_run = torch if trained.backend == "torch" else ("mlx", "mlx_lm")
    for name in (*for_export, *for_run):
        if importlib.util.find_spec(name) is None:
            extra = "mlx" if name.startswith("mlx") else "torch"
            return f"{name.replace('_', '-')} isn't installed here; {installing(extra)}"
    return ""


def verify_export(trained: TrainedModel, form: Form, folder: Path, unpacked: Path | None = None) -> Comparison:
    """Compare the export in `folder`, as its library loads it, with the checkpoint as the run's own backend does.
    `unpacked`: the whole model that a quantized export was made from. Models are loaded one after another. Raises
    InvalidInputError if the checkpoint can't be, and RefusedError if the export can't."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    tokens = probe_tokens(vocabulary_size(trained.model) or 2)
    expected = _reference(trained, tokens)
    types = _types_of_16_bits(trained, unpacked or folder)
    if unpacked is None:
        return _verify_whole(trained, form, folder, types, expected)
    whole = _verify_whole(trained, "mlx", unpacked, types, expected)
    if not whole.agrees:
        return whole
    values = replace(expected, logits=mlx_logits(_dequantized_mlx_model(unpacked, folder), tokens))
    return replace(compare(values, mlx_logits(_by_mlx(folder), tokens)), library=whole.library)


def _verify_whole(
    trained: TrainedModel, form: Form, folder: Path, types: Mapping[str, str], expected: Reference
) -> Comparison:
    """Compare an export that isn't quantized. Where it has weights of 16 bits, the model with its own weights rounded
    likewise is the one to agree with."""
    tokens, library = expected.tokens, None
    if form == "mlx":
        logits, library = _mlx_export_logits(folder, trained.model, tokens)
    else:
        logits = torch_logits(_by_torch(folder), tokens)
    if not types:
        return replace(compare(expected, logits), library=library)
    # MLX's adapters can't be added to a quantized base, of which only torch unpacks all layers.
    in_mlx = trained.backend == "mlx" and (form == "mlx" or trained.lora is None)

    def merged(types: Mapping[str, str]) -> Reference:
        if in_mlx:
            return replace(expected, logits=mlx_logits(_mlx_model(trained, types), tokens))
        return replace(expected, logits=torch_logits(_torch_model(trained, types), tokens))

    comparison = compare(merged(types), logits)
    if trained.lora is not None:
        adding = compare(expected, merged({}).logits)  # what adding the adapters changed
        comparison = comparison if adding.agrees else adding
    return replace(comparison, rounding=_difference(expected.logits, logits), library=library)


def _mlx_export_logits(folder: Path, base: Path, tokens: Tokens) -> tuple[Logits, float | None]:
    """Return the logits of an export in mlx-lm, computed as transformers does where mlx-lm does otherwise; and how
    much its own differ from them, if they do."""
    from trainctl.trainer.model.mlx_model import is_put_right, put_right

    model, config = _by_mlx(folder, base), model_config(_mlx_base(folder, base))
    plain = mlx_logits(model, tokens)
    if not is_put_right(config):
        return plain, None
    logits = mlx_logits(put_right(model, config), tokens)
    return logits, _difference(plain, logits) or None


def compare(expected: Reference, logits: Logits) -> Comparison:
    """Return the largest difference, and the largest that rounding explains; not a number counts as infinite."""
    scale = max(1.0, float(np.max(np.abs(expected.logits))))
    allowed = min(max(_MIN_ALLOWED * scale, _TIMES_NOISE * expected.noise), _MAX_ALLOWED * scale)
    return Comparison(_difference(expected.logits, logits), allowed)


def _difference(left: Logits, right: Logits) -> float:
    largest = float(np.max(np.abs(left - right)))
    return largest if np.isfinite(largest) else float("inf")


def probe_tokens(vocabulary: int) -> Tokens:
    """Return the same tokens for the same vocabulary."""
    numbers = mix(np.arange(1, _ROWS * _LENGTH + 1, dtype=np.uint64)) % np.uint64(vocabulary)
    return numbers.astype(np.int64).reshape(_ROWS, _LENGTH)


def torch_logits(model: Any, tokens: Tokens) -> Logits:
    """Return the logits of a model of torch, without dropout; a decoder beside an encoder is given the same tokens."""
    import torch

    inputs = torch.from_numpy(tokens)
    decoder = {"decoder_input_ids": inputs} if model.config.is_encoder_decoder else {}
    with torch.inference_mode():
        logits: Logits = model.eval()(input_ids=inputs, use_cache=False, **decoder).logits.float().numpy()
    return logits


def mlx_logits(model: Any, tokens: Tokens) -> Logits:
    """Return the logits of a model of mlx-lm, in float32 on the CPU."""
    import mlx.core as mx

    with mx.stream(mx.cpu):
        model.set_dtype(mx.float32)
        model.eval()
        return np.array(model(mx.array(tokens)).astype(mx.float32))


# ---------------------------------------------------------------- by our own backend


def _reference(trained: TrainedModel, tokens: Tokens) -> Reference:
    if trained.backend == "mlx":
        from trainctl.trainer.backends.mlx_passes import MlxPasses

        model, logits_of = _mlx_model(trained), mlx_logits
        passes: Any = MlxPasses(model)
    else:
        from trainctl.trainer.backends.torch_passes import TorchPasses

        model, logits_of = _torch_model(trained).eval(), torch_logits
        passes = TorchPasses(model)
    logits = logits_of(model, tokens)
    with passes.probing(_LOWEST_BIT):
        return Reference(tokens, logits, _difference(logits, logits_of(model, tokens)))


def _torch_model(trained: TrainedModel, merged: Mapping[str, str] | None = None) -> Any:
    """Return the trained model; or `merged` by peft with its adapters, those of its weights that are named there
    rounded to that type."""
    import torch

    from trainctl.trainer.adapters import torch_lora
    from trainctl.trainer.model import torch_quantized
    from trainctl.trainer.model.torch_model import read_model

    model: Any = read_model(trained.model, _WHERE)
    if merged is not None:
        model = torch_quantized.whole(model)
    with torch.no_grad():
        if trained.lora is not None:
            model, values = torch_lora.attach(model, trained.lora), trained.adapters()
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.from_numpy(values[torch_lora.stored_name(name)]))
            model = model if merged is None else model.merge_and_unload()
        for name, weight in chain(model.named_parameters(), model.named_buffers()):
            if merged and name in merged:
                weight.copy_(weight.to(getattr(torch, merged[name])))
    return model.eval()


def _mlx_model(trained: TrainedModel, merged: Mapping[str, str] | None = None) -> Any:
    """Return what `_torch_model` does on MLX, merged by mlx-lm; its base then isn't quantized."""
    import mlx.core as mx
    from mlx.utils import tree_unflatten

    from trainctl.trainer.adapters import mlx_lora
    from trainctl.trainer.model.mlx_model import flat, read_model

    model = read_model(trained.model, _WHERE, _LENGTH)
    if trained.lora is not None:
        places, values = mlx_lora.attach(model, trained.lora), trained.adapters()
        turned = ((place, values[name].T if place.transposed else values[name]) for name, place in places.items())
        model.load_weights([(place.name, mx.array(array)) for place, array in turned], strict=False)
    if merged is not None:
        with mx.stream(mx.cpu):
            model.set_dtype(mx.float32)
            adapted = [(name, layer.fuse()) for name, layer in model.named_modules() if hasattr(layer, "fuse")]
            model.update_modules(tree_unflatten(adapted))
            weights = (
                (name, array, getattr(mx, merged.get(name, "float32"))) for name, array in flat(model.parameters())
            )
            model.load_weights([(name, array.astype(dtype).astype(mx.float32)) for name, array, dtype in weights])
    return model


def _types_of_16_bits(trained: TrainedModel, folder: Path) -> dict[str, str]:
    """Return the types of those weights of 16 bits in a directory, by the name that the run's backend has for what is
    stored in them."""
    stored = {name: FLOATS[it.dtype] for name, it in stored_tensors(folder).items() if it.dtype in ("F16", "BF16")}
    if trained.backend == "mlx" or not stored:
        return stored
    from trainctl.trainer.model.torch_model import held_names

    names = held_names(trained.model, _WHERE)
    return {names.get(name, name): dtype for name, dtype in stored.items()}


# ---------------------------------------------------------------- by the library that an export is for


def _dequantized_mlx_model(unpacked: Path, folder: Path) -> Any:
    """Return mlx-lm's model of a whole directory, with the values that the quantized one in `folder` stands for."""
    import mlx.core as mx

    model, stored = _by_mlx(unpacked), stored_tensors(folder)
    weights = ((name, widened(weight())) for name, weight in whole_weights(folder, stored).items())
    model.load_weights([(name, mx.array(array)) for name, array in weights])
    return model


def _by_torch(folder: Path) -> Any:
    """Return the whole model in `folder` by transformers, or the adapters there on their base by peft."""
    import torch

    adapters = folder / "adapter_config.json"
    if adapters.exists():
        library, encodes = "peft", read_object(adapters, "adapter configuration")["task_type"] == "SEQ_2_SEQ_LM"
    else:
        library, encodes = "transformers", bool(model_config(folder).get("is_encoder_decoder"))
    name = f"Auto{'Peft' if library == 'peft' else ''}ModelFor{'Seq2SeqLM' if encodes else 'CausalLM'}"
    loader: Any = getattr(importlib.import_module(library), name)
    with opened_by(library):
        return loader.from_pretrained(str(folder), dtype=torch.float32, trust_remote_code=False)


def _by_mlx(folder: Path, base: Path | None = None) -> Any:
    """Return the whole model in `folder`, or the adapters there on their own base, if there is one, or on `base`."""
    from mlx_lm import utils

    whole = _mlx_base(folder, base)
    check_no_code(model_config(whole), whole, _WHERE)
    with opened_by("mlx-lm"):
        model, _ = utils.load_model(whole)
        return utils.load_adapters(model, str(folder)) if (folder / "adapter_config.json").exists() else model


def _mlx_base(folder: Path, base: Path | None) -> Path:
    if base is None or not (folder / "adapter_config.json").exists():
        return folder
    return own if (own := folder / OWN_BASE).exists() else base
