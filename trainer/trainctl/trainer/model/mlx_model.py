"""Models of mlx-lm, from a Hugging Face directory."""

import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from trainctl.protocol.config.model_facts import HEADS, has_own_head, stored_tensors
from trainctl.protocol.config.quantization import quantization_key
from trainctl.protocol.config.run_tables import GradientCheckpointing
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.model_files import only_the_model
from trainctl.trainer.model import rope_config

os.environ.setdefault("MLX_ENABLE_TF32", "0")  # float32 means float32: promised tolerances are below TF32's

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

_NO_SLIDING_WINDOW = ("gemma2", "ministral3", "mistral", "mixtral", "phi3", "qwen2", "qwen3", "starcoder2")  # in mlx-lm

_TANH_GELU = "gelu_pytorch_tanh"
"""The activation of Gemma and StarCoder2, which mlx-lm computes without the approximation by tanh."""
_SCALED_EMBEDDINGS = ("gemma", "gemma2", "gemma3_text")
"""Families that multiply embeddings by the root of their width. transformers rounds the root to the embeddings' type;
mlx-lm to bfloat16 in Gemma 3, and not at all in Gemma and Gemma 2."""
_CONSTANTS = {"gemma4_text": ["layer_scalar"]}
"""Arrays that a family isn't trained on, though mlx-lm has them among its parameters."""

_layers: Any = nn  # whose stubs lack some of them
_LOAD_ERRORS = (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RuntimeError)


def read_model(path: Path, where: str, longest: int, *, with_weights: bool = True) -> Any:
    """Return the model in a Hugging Face directory, for sequences of up to `longest` tokens; no code in it is run.
    Without weights, it has mlx-lm's first values. Raises InvalidInputError if it cannot be read, if mlx-lm leaves out
    its sliding window, or if its weights have other names or shapes in MLX, since checkpoints and other ranks know them
    by their Hugging Face ones."""
    config = rope_config.for_mlx(rope_config.read(path), longest)
    _check_window(config, where, longest)
    if config.get("model_type") == "glm":
        differs = "it rotates all dimensions of its heads; train with torch"
        raise InvalidInputError(f"{where}: model.path", f"mlx-lm's glm model differs from transformers': {differs}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from mlx_lm.utils import load_model

    try:
        stated = {"quantization": config[key]} if (key := quantization_key(config)) else {}
        with only_the_model(path, config | stated, with_weights=with_weights) as folder:
            model, _ = load_model(folder, strict=with_weights)
    except _LOAD_ERRORS as error:
        raise InvalidInputError(f"{where}: model.path", f"mlx-lm cannot load {path}: {first_line(error)}") from None
    except SystemExit:  # of a module whose own dependencies are missing
        problem = f"mlx-lm has no {config.get('model_type')} models here; train this architecture with torch"
        raise InvalidInputError(f"{where}: model.path", problem) from None
    put_right(model, config)
    if not with_weights:
        return model
    stored = stored_tensors(path)
    if has_own_head(stored) and not any(name.endswith(HEADS) for name, _ in flat(model.parameters())):
        problem = f"mlx-lm's {config.get('model_type')} drops the head of its own that {path} holds; train with torch"
        raise InvalidInputError(f"{where}: model.path", problem)
    for name, parameter in flat(model.trainable_parameters()):
        if name not in stored or stored[name].shape != tuple(parameter.shape):
            raise InvalidInputError(
                f"{where}: model.path",
                f"{name!r} is not stored in MLX's layout in {path}; train this architecture with torch",
            )
    return model


def set_dtype(model: Any, dtype: Any) -> None:
    """Compute in `dtype`. The rows of quantized embeddings are rounded to it once, as on torch; mlx-lm unpacks affine
    ones in `dtype`, which rounds twice, and others always to bfloat16."""
    model.set_dtype(dtype)
    for module in model.modules():
        if isinstance(module, _layers.QuantizedEmbedding):
            unpacked = _unpacked_in(dtype)
            module.__class__ = _scaled(unpacked) if hasattr(module, "embedding_scale") else unpacked


@functools.cache
def _unpacked_in(dtype: Any) -> Any:
    class Embedding(_layers.QuantizedEmbedding):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            scales, biases = self.scales[x], None
            if "biases" in self:
                scales, biases = scales.astype(mx.float32), self.biases[x].astype(mx.float32)
            how = {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}
            rows = mx.dequantize(self.weight[x], scales=scales, biases=biases, **how)
            return rows.astype(dtype)

    return Embedding


@functools.cache
def _scaled(kind: Any) -> Any:
    """Return a class of embeddings whose rows are multiplied by the module's `embedding_scale`."""

    class Scaled(kind):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            rows = self.rows(x)
            return rows * mx.array(self.embedding_scale, mx.float32).astype(rows.dtype)

        def rows(self, x: Any) -> Any:
            return super().__call__(x)

    return Scaled


def put_right(model: Any, config: dict[str, Any]) -> Any:
    """Return the model as transformers computes it, its constants frozen, which torch ranks don't train either."""
    family = config.get("model_type", "")
    if keys := _CONSTANTS.get(family):
        model.freeze(keys=keys)
    if _has_tanh_gelu(config):
        for layer in model.layers:
            kind: Any = type(layer.mlp)
            layer.mlp.__class__ = _tanh_mlp(kind)
    if family in _SCALED_EMBEDDINGS:
        body, embeddings = model.model, model.model.embed_tokens
        kind = type(embeddings)
        embeddings.embedding_scale = body.args.hidden_size**0.5
        embeddings.__class__ = _scaled(kind)
        body.args = dataclasses.replace(
            body.args, hidden_size=1
        )  # of which the body reads the width for its scale only
    return model


def is_put_right(config: dict[str, Any]) -> bool:
    """Return whether mlx-lm itself computes the family of a config.json unlike transformers."""
    return _has_tanh_gelu(config) or config.get("model_type") in _SCALED_EMBEDDINGS


def _has_tanh_gelu(config: dict[str, Any]) -> bool:
    family, activation = config.get("model_type"), config.get("hidden_act", _TANH_GELU)
    return family == "gemma" or (family == "starcoder2" and activation == _TANH_GELU)


@functools.cache
def _tanh_mlp(kind: Any) -> Any:
    """Return a feed-forward class with the names and parameters of `kind`, of Gemma or StarCoder2."""

    class TanhMLP(kind):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            if "gate_proj" in self:
                return self.down_proj(_layers.gelu_approx(self.gate_proj(x)) * self.up_proj(x))
            return self.c_proj(_layers.gelu_approx(self.c_fc(x)))

    return TanhMLP


def flat(tree: Any) -> list[tuple[str, Any]]:
    """Return (name, array) pairs of a tree of parameters."""
    pairs: Any = tree_flatten(tree)
    return list(pairs)


def _check_window(config: dict[str, Any], where: str, longest: int) -> None:
    """Raise InvalidInputError if mlx-lm doesn't see what the model does: sequences of up to the window's length look
    the same without one."""
    window, kind = config.get("sliding_window"), config.get("model_type", "")
    windowed = kind in _NO_SLIDING_WINDOW and config.get("use_sliding_window", not kind.startswith("qwen"))
    if windowed and isinstance(window, int) and longest > window:
        raise InvalidInputError(
            f"{where}: data.sequence_length",
            f"{longest} is above the sliding window of {window}; mlx-lm ignores that window in {kind} models: "
            f"set at most {window}, or train with torch",
        )


def checkpoint_layers(model: Any, mode: GradientCheckpointing, where: str) -> None:
    """Have decoder layers keep only their input, and be computed again in the backward pass. That trades time for
    memory (Chen et al. 2016) and changes no bit of a gradient. "alternate" applies to every other layer, from the
    first. Raises InvalidInputError for a model that can't do it."""
    if mode == "none":
        return
    layers: list[Any] = getattr(model, "layers", [])
    if not layers:
        problem = f'this model has no layers to which {mode!r} applies; use "none"'
        raise InvalidInputError(f"{where}: model.gradient_checkpointing", problem)
    for layer in layers[:: 2 if mode == "alternate" else 1]:
        kind: Any = type(layer)
        layer.__class__ = _checkpointed(kind)


@functools.cache
def _checkpointed(kind: Any) -> Any:
    """Return a class of layers that have the names and parameters of `kind`."""

    def constant(argument: Any) -> Any:
        """mx.checkpoint differentiates all arrays that it is given, masks and positions too."""
        is_array = isinstance(argument, mx.array)
        return mx.stop_gradient(argument) if is_array and not mx.issubdtype(argument.dtype, mx.floating) else argument

    def compute(layer: Any, *args: Any, **kwargs: Any) -> Any:
        constants = {name: constant(value) for name, value in kwargs.items()}
        return kind.__call__(layer, *map(constant, args), **constants)

    class Checkpointed(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return super().__call__(*args, **kwargs)
            return nn.utils.checkpoint(self, functools.partial(compute, self))(*args, **kwargs)

    return Checkpointed


class DocumentMask:
    """A document mask in the place of mlx-lm's key-value cache, which models ask for the mask of attention. It keeps
    nothing: tokens see those before them in their own document. Positions of rotary embeddings run through, as only
    their differences matter."""

    offset = 0

    def __init__(self, positions: Any, model: Any) -> None:
        """`positions`: of each token in its document, [B, T]."""
        starts = mx.arange(positions.shape[1]) - positions
        together = starts[:, None, :, None] == starts[:, None, None, :]
        # In mlx-lm's Gemma 2, scores have an axis for key heads and one for the query heads of each.
        groups_heads = model.model_type == "gemma2" and model.layers[0].self_attn.repeats > 1
        self._together = together[:, None] if groups_heads else together

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values

    def make_mask(self, length: int, window_size: int | None = None, **_: Any) -> Any:
        """Return [B, 1, T, T], or [B, 1, 1, T, T] where heads are grouped; true where a token sees another."""
        from mlx_lm.models.base import create_causal_mask

        return self._together & create_causal_mask(length, window_size=window_size)
