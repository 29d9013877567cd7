"""Whether a node's memory holds the run, and by how much: by measured peaks, else by the model's sizes. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import NodeFacts, PlannedRun, Source
from trainctl.protocol.batch import memory_model
from trainctl.protocol.batch.device_table import device_of

TOGETHER: Final = "+"
"""Stands between the names of nodes that share their machine's memory; no node's name has it."""


class MemoryFit(msgspec.Struct, frozen=True):
    """Of one rank, at the peak of a step; None: not known."""

    node: str
    needed_bytes: int | None
    cap_bytes: int | None
    source: Source

    @property
    def spare_bytes(self) -> int | None:
        """What is left; below 0: what is missing."""
        return None if self.needed_bytes is None or self.cap_bytes is None else self.cap_bytes - self.needed_bytes

    @property
    def fits(self) -> bool | None:
        spare = self.spare_bytes
        return None if spare is None else spare >= 0


def fit_of(node: NodeFacts, run: PlannedRun, micro: int, *, in_group: bool) -> MemoryFit:
    """With passes of `micro` samples. A rank of a group also holds the buffer of the sum, and one whose device's memory
    is the host's the copy that a checkpoint is written from, which a calibration doesn't make."""
    needed, source = _needed(node, micro)
    if needed is not None and in_group:
        needed += run.gradient_bytes or 0
    if needed is not None and source == "measured" and run.background_checkpoints and node.shared_bytes is not None:
        needed += run.checkpoint_bytes
    return MemoryFit(node.name, needed, cap_of(node), source)


def shared_fits(nodes: Sequence[NodeFacts], fits: Sequence[MemoryFit]) -> tuple[MemoryFit, ...]:
    """What nodes that share their machine's memory need together, by machine. Each keeps its own cap beside that."""
    by_machine: dict[str, list[tuple[NodeFacts, MemoryFit]]] = {}
    for node, fit in zip(nodes, fits, strict=True):
        if node.machine and node.shared_bytes is not None and fit.needed_bytes is not None:
            by_machine.setdefault(node.machine, []).append((node, fit))
    return tuple(
        MemoryFit(
            TOGETHER.join(node.name for node, _ in found), sum(fit.needed_bytes or 0 for _, fit in found),
            min(node.shared_bytes or 0 for node, _ in found),
            "estimated" if any(fit.source == "estimated" for _, fit in found) else "measured",
        )
        for found in by_machine.values() if len(found) > 1
    )  # fmt: skip


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
    model = memory_model.fit(peaks)
    if model is not None:
        return int(model.peak(micro)), "measured"
    if node.memory is None:
        return None, "unknown"
    return int(node.memory.peak(micro)), "estimated"
