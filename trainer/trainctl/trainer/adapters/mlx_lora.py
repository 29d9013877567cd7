"""LoRA on MLX, by mlx-lm's layers, which hold the transposes of peft's matrices."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_unflatten

from trainctl.trainer.adapters.lora import Lora, channel_keys, kept, stored_name, threshold

_DECODER_LAYER = re.compile(r"^.*\.layers\.\d+\.")


@dataclass(frozen=True)
class Place:
    """A parameter's place in an MLX model."""

    name: str
    transposed: bool


def attach(model: Any, lora: Lora) -> dict[str, Place]:
    """Freeze the model's weights and put adapters on the layers of `lora`. Returns the place of each adapter's matrix
    by peft's name."""
    from mlx_lm.tuner.lora import LoRALinear

    model.freeze()
    linear = dict(model.named_modules())
    kind: Any = LoRALinear
    layers = {
        layer: kind.from_base(linear[layer], r=lora.table.rank, dropout=0.0, scale=lora.scale) for layer in lora.layers
    }
    if lora.table.dropout:
        for place, (layer, (_, width)) in enumerate(sorted(lora.layers.items())):
            layers[layer].dropout = Dropout(lora, place, width)
    model.update_modules(tree_unflatten([*layers.items()]))
    return places(lora)


@contextmanager
def disabled(model: Any, lora: Lora) -> Iterator[None]:
    """Have the model compute without its adapters: their layers are replaced by the frozen ones for a while."""
    adapted = {layer: module for layer, module in model.named_modules() if layer in lora.layers}
    try:
        model.update_modules(tree_unflatten([(layer, module.linear) for layer, module in adapted.items()]))
        yield
    finally:
        model.update_modules(tree_unflatten([*adapted.items()]))


def places(lora: Lora) -> dict[str, Place]:
    """Return where mlx-lm holds each matrix of the adapters, in a model and in its files, by peft's name."""
    return {
        stored_name(layer, matrix): Place(f"{layer}.lora_{matrix.lower()}", transposed=True)
        for layer in lora.layers
        for matrix in ("A", "B")
    }


def mlx_config(lora: Lora) -> dict[str, Any]:
    """Return adapter_config.json, with which mlx-lm opens the adapters. It names layers within a decoder layer, so it
    may put adapters on more of them; those without values in the file change nothing."""
    keys = sorted({_DECODER_LAYER.sub("", layer) for layer in lora.layers})
    return {
        "fine_tune_type": "lora",
        "num_layers": lora.table.layers or lora.decoder_layers,
        "lora_parameters": {"rank": lora.table.rank, "scale": lora.scale, "dropout": lora.table.dropout, "keys": keys},
    }


class Dropout(nn.Module):  # type: ignore[misc, name-defined]
    """Drops inputs of one adapter while training."""

    def __init__(self, lora: Lora, place: int, width: int) -> None:
        super().__init__()
        self._tokens, self._rate = lora.token_keys, lora.table.dropout
        self._channels = mx.array(channel_keys(place, width))

    def __call__(self, x: Any) -> Any:
        if not self.training or self._tokens.value is None:
            return x
        stays = kept(self._tokens.value, self._channels, threshold(self._rate))
        return mx.where(stays, x.astype(mx.float32) * (1 / (1 - self._rate)), 0)
