"""Which machine for which model size: the fastest node whose memory holds it. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import NodeFacts
from trainctl.protocol.advice.memory_fit import cap_of

FOR_ACTIVATIONS: Final = 0.1
"""Part of a node's memory that is left for activations and logits."""
_OVERHEAD: Final = 1.1
"""As in batch/memory_estimate.py: the allocator's."""


class Method(msgspec.Struct, frozen=True):
    """A way to train, and what a parameter of the model takes of it."""

    name: str
    bytes_per_parameter: float


METHODS: Final = (
    Method("all weights, float32", 4 + 8 + 4 + 4),
    Method("all weights, bfloat16", 4 + 8 + 4 + 4 + 2),
    Method("LoRA, bfloat16", 2),
    Method("LoRA on mlx-4bit", 0.5625),
)
"""Masters, two moments, accumulated gradients, those of one micro-batch, and a copy of 16 bits; adapters alone need
the weights: 16 bits, or 4 with a scale and an offset of 16 bits for each 64."""


class SizeRange(msgspec.Struct, frozen=True):
    """Up to how many parameters a node is the fastest that holds the model."""

    method: str
    node: str
    above: float  # parameters
    up_to: float


def size_ranges(nodes: Sequence[NodeFacts], rates: dict[str, float]) -> tuple[SizeRange, ...]:
    """For each method, the nodes in the order of the sizes that they are for. `rates`: of each node alone; those
    without one aren't considered."""
    fastest_first = sorted((node for node in nodes if node.name in rates), key=lambda node: -rates[node.name])
    found = []
    for method in METHODS:
        reached = 0.0
        for node in fastest_first:
            most = _most_parameters(node, method)
            if most > reached:
                found.append(SizeRange(method.name, node.name, reached, most))
                reached = most
    return tuple(found)


def _most_parameters(node: NodeFacts, method: Method) -> float:
    cap = cap_of(node)
    return 0.0 if cap is None else cap * (1 - FOR_ACTIVATIONS) / _OVERHEAD / method.bytes_per_parameter
