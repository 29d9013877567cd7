"""The linear layers to which a run's adapters are attached, by the names and shapes of the model's stored weights."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainctl.protocol.config.run_tables import AdapterTable
from trainctl.protocol.errors import InvalidInputError

_LINEAR = re.compile(
    r"^(?P<layer>(?P<stack>.*\.(?:layers|block))\.(?P<number>\d+)\..+(?<!\.relative_attention_bias))\.weight$"
)
"""Weights of a decoder or encoder layer by stored name; T5 calls a layer a block, and its biases of attention are not
of a linear layer."""


_MIXTURE = re.compile(r"^(?P<block>.+?)\.(?P<part>experts|gate|router)\.")
"""Weights of a mixture of experts by stored name, if the block has experts: theirs, and those of its router."""


@dataclass(frozen=True)
class AdaptedLayers:
    """The adapted layers of one model."""

    shapes: dict[str, tuple[int, int]]  # (out, in) of each adapted linear layer by its path in the model, ascending
    decoder_layers: int  # that the model has; the most of an encoder and a decoder
    left_out: tuple[str, ...] = ()  # "experts" and "routers", if the model has them: no adapter can be attached there


def adapted_layers(table: AdapterTable, stored: Mapping[str, tuple[int, ...]], where: str) -> AdaptedLayers:
    """The layers that `table` asks for in a model whose weights have the `stored` shapes. Raises InvalidInputError,
    blaming a field of `where`, for a layer that isn't there."""
    mixtures = mixture_weights(stored)
    matrices = [name for name, shape in stored.items() if len(shape) == 2 and name not in mixtures]
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
        layer
        for layer, (stack, number) in found.items()
        if number >= counts[stack] - last and _is_target(layer, table.targets)
    }
    _check_targets(table, found, stored, where)
    shapes = {layer: stored[f"{layer}.weight"] for layer in sorted(chosen)}
    left_out = tuple(sorted(set(mixtures.values())))
    return AdaptedLayers({layer: (shape[0], shape[1]) for layer, shape in shapes.items()}, count, left_out)


def mixture_weights(stored: Mapping[str, tuple[int, ...]]) -> dict[str, str]:
    """Return the weights of a mixture of experts by stored name, each with "experts" or "routers". Experts are stored
    one by one or stacked; libraries hold them as one tensor that isn't a linear layer's, and compute routers apart."""
    blocks = {name.partition(".experts.")[0] for name in stored if ".experts." in name}
    stacked = [name for name, shape in stored.items() if len(shape) == 3 and shape[1] > 1]  # 1: of a convolution
    bare = [name for name in stacked if ".experts." not in name]
    blocks |= {name.rsplit(".", 2)[0] for name in bare}
    blocks |= {name.rsplit(".", 1)[0] for name in bare if not name.endswith(".weight")}  # such as moe.w1: no layer's
    matches = {name: match for name in stored if (match := _MIXTURE.match(name)) and match["block"] in blocks}
    parts = {name: "experts" if match["part"] == "experts" else "routers" for name, match in matches.items()}
    return parts | {name: "experts" for name in stacked if any(name.startswith(f"{block}.") for block in blocks)}


def _is_target(layer: str, targets: str | tuple[str, ...]) -> bool:
    return isinstance(targets, str) or any(f".{layer}".endswith(f".{target}") for target in targets)


def _check_targets(
    table: AdapterTable, layers: Mapping[str, object], stored: Mapping[str, tuple[int, ...]], where: str
) -> None:
    if isinstance(table.targets, str):
        return
    mixtures = mixture_weights(stored)
    for target in table.targets:
        if any(_is_target(layer, (target,)) for layer in layers):
            continue
        known = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
        named = [name for name in stored if _is_target(name.removesuffix(".weight"), (target,))]
        problem = f"the model has no layer {target!r}; it has {known}"
        if parts := {mixtures[name] for name in named if name in mixtures}:
            problem = f"adapters can't be attached to {' or '.join(sorted(parts))}; choose from {known}"
        elif target == "lm_head" or any(len(stored[name]) == 2 for name in named):
            problem = f"adapters can't be attached to lm_head or the embeddings; choose from {known}"
        raise InvalidInputError(f"{where}: adapter.targets", problem)
