"""The fit of a run in a node's memory, and the sizes of models that fit: by measured peaks, else by the model's sizes.
Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import NodeFacts, PlannedRun, Source
from trainctl.protocol.batch import memory_estimate
from trainctl.protocol.batch.device_table import device_of

TOGETHER: Final = "+"
"""Stands between the names of nodes that share their machine's memory; no node's name has it."""


class MemoryFit(msgspec.Struct, frozen=True):
    """The memory of one rank at the peak of a step; None: not known."""

    node: str
    needed_bytes: int | None
    cap_bytes: int | None
    source: Source

    @property
    def spare_bytes(self) -> int | None:
        """Return the memory that is left; below 0: that is missing."""
        return None if self.needed_bytes is None or self.cap_bytes is None else self.cap_bytes - self.needed_bytes

    @property
    def fits(self) -> bool | None:
        spare = self.spare_bytes
        return None if spare is None else spare >= 0


def fit_of(node: NodeFacts, run: PlannedRun, micro: int, *, in_group: bool) -> MemoryFit:
    """Return the fit of a rank with passes of `micro` samples. A rank of a group also holds the buffer of the sum, and
    one whose device's memory is the host's the copy that a checkpoint is written from, which a calibration doesn't
    make."""
    needed, source = _needed(node, micro)
    if needed is not None and in_group:
        needed += run.gradient_bytes or 0
    if needed is not None and source == "measured" and run.background_checkpoints and node.shared_bytes is not None:
        needed += run.checkpoint_bytes
    return MemoryFit(node.name, needed, cap_of(node), source)


def shared_fits(nodes: Sequence[NodeFacts], fits: Sequence[MemoryFit]) -> tuple[MemoryFit, ...]:
    """Return the needs of nodes that share their machine's memory, together and by machine. Each keeps its own cap
    beside that."""
    by_machine: dict[str, list[tuple[NodeFacts, MemoryFit]]] = {}
    for node, fit in zip(nodes, fits, strict=True):
        if node.machine and node.shared_bytes is not None and fit.needed_bytes is not None:
            by_machine.setdefault(node.machine, []).append((node, fit))
    return tuple(
        MemoryFit(
            TOGETHER.join(node.name for node, _ in found),
            sum(fit.needed_bytes or 0 for _, fit in found),
            min(node.shared_bytes or 0 for node, _ in found),
            "estimated" if any(fit.source == "estimated" for _, fit in found) else "measured",
        )
        for found in by_machine.values()
        if len(found) > 1
    )


def cap_of(node: NodeFacts) -> int | None:
    """Bytes that the node's rank may take. A profile of other settings doesn't count: they may have limited it."""
    if node.cap_bytes is not None:
        return node.cap_bytes
    if node.profile is not None and node.profile.memory_cap_bytes is not None:
        return node.profile.memory_cap_bytes
    device = device_of(node.device)
    return None if device is None else device.memory_bytes


def _needed(node: NodeFacts, micro: int) -> tuple[int | None, Source]:
    peaks = (
        [(one.micro, float(one.peak_bytes)) for one in node.profile.passes if one.peak_bytes] if node.profile else []
    )
    exact = next((int(peak) for size, peak in peaks if size == micro), None)
    if exact is not None:
        return exact, "measured"
    model = memory_estimate.fit(peaks)
    if model is not None:
        return int(model.peak(micro)), "measured"
    if node.memory is None:
        return None, "unknown"
    return int(node.memory.peak(micro)), "estimated"


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
    """Return, for each method, the nodes in the order of the sizes that they are for. `rates`: of each node alone;
    those without one aren't considered."""
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
