"""The linear layers to which a run's adapters are attached, by the names and shapes of the model's stored weights."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol.config.run_tables import AdapterTable
from trainctl.protocol.errors import InvalidInputError

_LINEAR = re.compile(
    r"^(?P<layer>(?P<stack>.*\.(?:layers|block))\.(?P<number>\d+)\..+(?<!\.relative_attention_bias))\.weight$"
)
"""Weights of a decoder or encoder layer by stored name; T5 calls a layer a block, and its biases of attention are not
of a linear layer."""


class AdaptedLayers(NamedTuple):
    """Of one model."""

    shapes: dict[str, tuple[int, int]]  # (out, in) of each adapted linear layer by its path in the model, ascending
    decoder_layers: int  # that the model has; the most of an encoder and a decoder


def adapted_layers(table: AdapterTable, stored: Mapping[str, tuple[int, ...]], where: str) -> AdaptedLayers:
    """The layers that `table` asks for in a model whose weights have the `stored` shapes. Raises InvalidInputError,
    blaming a field of `where`, for a layer that isn't there."""
    matrices = [name for name, shape in stored.items() if len(shape) == 2]
    found = {
        match["layer"]: (match["stack"], int(match["number"])) for name in matrices if (match := _LINEAR.match(name))
    }
    if not found:
        raise InvalidInputError(
            f"{where}: adapter.kind", "the model has no linear layers to which an adapter can be attached"
        )
    counts: dict[str, int] = {}
    for stack, number in found.values():
        counts[stack] = max(counts.get(stack, 0), number + 1)
    count = max(counts.values())
    if table.layers > count:
        raise InvalidInputError(f"{where}: adapter.layers", f"{table.layers} is above the model's {count}; 0 means all")
    last = table.layers or count
    chosen = {
        layer for layer, (stack, number) in found.items()
        if number >= counts[stack] - last and _is_target(layer, table.targets)
    }  # fmt: skip
    _check_targets(table, found, [name.removesuffix(".weight") for name in matrices], where)
    shapes = {layer: stored[f"{layer}.weight"] for layer in sorted(chosen)}
    return AdaptedLayers({layer: (shape[0], shape[1]) for layer, shape in shapes.items()}, count)


def _is_target(layer: str, targets: str | tuple[str, ...]) -> bool:
    return isinstance(targets, str) or any(f".{layer}".endswith(f".{target}") for target in targets)


def _check_targets(table: AdapterTable, layers: Mapping[str, object], matrices: Sequence[str], where: str) -> None:
    if isinstance(table.targets, str):
        return
    for target in table.targets:
        if any(_is_target(layer, (target,)) for layer in layers):
            continue
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        problem = f"the model has no layer {target!r}; it has {known}"
        if target == "lm_head" or any(_is_target(matrix, (target,)) for matrix in matrices):
            problem = f"adapters can't be attached to lm_head or the embeddings; choose from {known}"
        raise InvalidInputError(f"{where}: adapter.targets", problem)
