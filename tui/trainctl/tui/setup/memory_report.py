"""What a run trains, and an estimate of each node's memory by part."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.batch.memory_estimate import MemoryEstimate, estimate_memory
from trainctl.protocol.config import run_file
from trainctl.protocol.config.fit_warnings import fit_warnings
from trainctl.protocol.config.model_facts import ModelFacts, read_facts
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.tui.text.formatting import gigabytes


class MemoryReport(NamedTuple):
    """Of one run."""

    family: str
    nodes: dict[str, MemoryEstimate]
    warnings: tuple[str, ...] = ()

    @property
    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        first = next(iter(self.nodes.values()))
        return {
            "family": self.family, "parameters": first.parameters, "trained": first.trained,
            "gradient_bytes": first.gradient_bytes, "warnings": self.warnings,
            "memory": {node: {**found.parts, "total": found.total} for node, found in self.nodes.items()},
        }  # fmt: skip


def report_of(config: RunFile, nodes: Sequence[str], where: str) -> MemoryReport | None:
    """Of a run's nodes; None if no node's model is on this machine, or it doesn't state its sizes. Raises
    InvalidInputError for adapters of layers that the model doesn't have."""
    names = tuple(nodes) or ("",)
    facts = _facts_here(config, names, where)
    if facts is None or not facts.shapes:
        return None
    estimates = {}
    for name in names:
        table = config.nodes.get(name, NodeTable())
        backend = table.backend if table.backend != "auto" else "mlx" if sys.platform == "darwin" else "torch"
        estimates[name] = estimate_memory(run_file.on_node(config, name), facts, table, backend, where)
    return MemoryReport(facts.family, estimates, fit_warnings(config, facts, where))


def _facts_here(config: RunFile, nodes: Sequence[str], where: str) -> ModelFacts | None:
    for name in nodes:
        model = Path(run_file.on_this_machine(config, name).model.path)
        if (model / "config.json").is_file():
            return read_facts(model, f"{where}: model.path")
    return None


def report_lines(report: MemoryReport) -> list[str]:
    """One fact per line."""
    first = next(iter(report.nodes.values()))
    part = "all" if first.trained == first.parameters else f"{first.trained / first.parameters:.2%}"
    lines = [
        f"trains {first.trained:,} parameters ({part} of {first.parameters:,}); "
        f"{gigabytes(first.gradient_bytes)} GB of gradients per step"
    ]
    for node, found in report.nodes.items():
        parts = ", ".join(f"{name} {gigabytes(size)}" for name, size in found.parts.items())
        place = f" on {node}" if node else ""
        lines.append(f"estimated memory{place}: {gigabytes(found.total)} GB ({parts})")
    return [*lines, *report.warnings]
