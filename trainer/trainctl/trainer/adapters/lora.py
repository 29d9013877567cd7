"""Low-rank adapters (LoRA, Hu et al. 2021; rsLoRA, Kalajdzievski 2023): the layers that get one, and first values.

A frozen linear layer with weights W [out, in] gets A [rank, in] and B [out, rank], in float32, and computes

    y = x W^T + scale (drop(x) A^T) B^T,    scale = alpha / rank, or alpha / sqrt(rank) for rsLoRA

Names, shapes and the files' layout are peft's: base_model.model.LAYER.lora_A.weight and .lora_B.weight. B starts at
zero and A uniform within 1 / sqrt(in), as in peft and mlx-lm. A is drawn from `mix` over a counter keyed by the run's
seed and the layer's place, so every rank starts from the same bits on either backend, without a message.

Dropout is a function of seed, position, token, layer and channel, so that a curve stays one curve.
Whatever rank or backend processes a sample, the same elements are dropped. All arithmetic is on 32-bit integers that
wrap; `mix` is SplitMix64's (permutation.py), of which the low 32 bits are taken, and >> shifts zeros in:

    hash(x):    x ^= x >> 16;  x *= M;  x ^= x >> 16;  x *= M;  x ^= x >> 16        M = 0x45D9F3B (T. Mueller)
    token_i   = hash(mix(mix(seed) + position) + i)       input i of the sample at a position
    channel_j = hash(mix(mix(DROPOUT_KEY) + place) + j)   input j of the adapter at a place in the order of their names
    element   = (token_i ^ channel_j) * M;  element ^= element >> 16;  element *= M

An element is dropped if it is, as a signed integer, below dropout * 2^32 - 2^31. The others are divided by 1 - dropout.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.adapted_layers import adapted_layers
from trainctl.protocol.config.model_facts import reference
from trainctl.protocol.config.objectives import objective_of
from trainctl.protocol.config.run_tables import AdapterTable, RunFile
from trainctl.trainer.common.model_files import stored_shapes
from trainctl.trainer.data.permutation import Indices, mix, uniform

Keys = NDArray[np.int32]
DROPOUT_KEY = 0x64726F70  # "drop"
_M = 0x45D9F3B
_PREFIX = "base_model.model."
_TAKEN_FOR_EXPERTS = (".gate_proj", ".up_proj", ".down_proj", ".w1", ".w2", ".w3")
"""Names by which peft, in a mixture of experts, takes any layer for one of the experts' that transformers has stacked.
Named as parameters, the layers get the same adapters, though peft has no dropout there."""


class TokenKeys:
    """The keys of the tokens in the micro-batch at hand, [B, T], which all layers of a model share; None: nothing is
    dropped."""

    value: Any = None


@dataclass(frozen=True)
class Lora:
    """The adapters of one model."""

    table: AdapterTable
    layers: Mapping[str, tuple[int, int]]  # (out, in) of each adapted linear layer by its path in the model
    decoder_layers: int  # that the model has
    task: Literal["CAUSAL_LM", "SEQ_2_SEQ_LM"] = "CAUSAL_LM"  # by peft's names
    beside_experts: bool = False  # whether the model is a mixture of experts
    token_keys: TokenKeys = field(default_factory=TokenKeys, compare=False)

    @property
    def scale(self) -> float:
        rank = self.table.rank
        return self.table.alpha / (math.sqrt(rank) if self.table.kind == "rslora" else rank)

    @property
    def names(self) -> frozenset[str]:
        """Names of its matrices, as in peft's files."""
        return frozenset(stored_name(layer, matrix) for layer in self.layers for matrix in ("A", "B"))

    def first_values(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """Return every adapter's matrices before step 1."""
        values: dict[str, NDArray[np.float32]] = {}
        key = int(mix(np.array([seed], np.uint64))[0])
        for place, (layer, (rows, columns)) in enumerate(sorted(self.layers.items())):
            bound = 1 / math.sqrt(columns)
            values[stored_name(layer, "A")] = uniform((self.table.rank, columns), key + place, bound)
            values[stored_name(layer, "B")] = np.zeros((rows, self.table.rank), np.float32)
        return values

    def peft_config(self, model: Path) -> dict[str, Any]:
        """Return adapter_config.json, with which peft opens the adapter on the model in `model`: by its id on the hub,
        if it came from there."""
        base = reference(model)
        taken = {layer for layer in self.layers if self.beside_experts and layer.endswith(_TAKEN_FOR_EXPERTS)}
        return {
            "peft_type": "LORA",
            "task_type": self.task,
            "inference_mode": True,
            "base_model_name_or_path": base.name,
            "revision": base.revision,
            "r": self.table.rank,
            "lora_alpha": self.table.alpha,
            "use_rslora": self.table.kind == "rslora",
            "lora_dropout": 0.0 if taken else self.table.dropout,
            "bias": "none",
            "fan_in_fan_out": False,
            "init_lora_weights": True,
            "target_modules": sorted(self.layers.keys() - taken),
            **({"target_parameters": sorted(f"{layer}.weight" for layer in taken)} if taken else {}),
        }


def stored_name(layer: str, matrix: str) -> str:
    """Return the name of matrix "A" or "B", as in peft's files."""
    return f"{_PREFIX}{layer}.lora_{matrix}.weight"


def read_lora(config: RunFile, where: str) -> Lora | None:
    """Return the adapters that a run file asks for, by the names and shapes in the model's files; None for full
    training. Raises as `lora_of`."""
    if config.adapter.kind == "full":
        return None
    lora = lora_of(config.adapter, stored_shapes(Path(config.model.path)), where)
    encodes = objective_of(config.objective, config.data.kind).encodes_prompts
    return replace(lora, task="SEQ_2_SEQ_LM") if encodes else lora


def lora_of(table: AdapterTable, stored: Mapping[str, tuple[int, ...]], where: str) -> Lora:
    """Return the adapters that `table` asks for in a model whose weights have the `stored` shapes. Raises
    InvalidInputError, blaming a field of `where`, for a layer that isn't there."""
    adapted = adapted_layers(table, stored, where)
    return Lora(table, adapted.shapes, adapted.decoder_layers, beside_experts=bool(adapted.left_out))


def channel_keys(place: int, width: int) -> Keys:
    """Return the keys of the inputs of an adapter."""
    return token_keys(DROPOUT_KEY, np.array([place]), width).reshape(width)


def threshold(dropout: float) -> int:
    """Return the least element that is kept."""
    return round(dropout * 2**32) - 2**31


def kept(tokens: Any, channels: Any, least: int) -> Any:
    """Return which elements stay, [B, T, channels]; keys in int32 arrays of any library."""
    element = (tokens[..., None] ^ channels) * _M
    element = (element ^ ((element >> 16) & 0xFFFF)) * _M
    return element >= least


def token_keys(seed: int, positions: Indices, length: int) -> Keys:
    """Return the keys of the samples at `positions`, each padded to `length`."""
    rows = mix(mix(np.array([seed], np.uint64)) + positions.astype(np.uint64)).astype(np.uint32)
    x: Any = rows[:, None] + np.arange(length, dtype=np.uint32)
    for _ in range(2):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(_M)
    keys: Keys = (x ^ (x >> np.uint32(16))).view(np.int32)
    return keys
