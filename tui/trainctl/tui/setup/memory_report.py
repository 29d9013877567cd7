"""The parameters that a run trains, and each node's memory: an estimate by part, and what an earlier run measured."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from trainctl.protocol.batch.memory_estimate import MemoryEstimate, MemoryModel, estimate_memory, estimated_line
from trainctl.protocol.batch.settings_rules import fit_warnings
from trainctl.protocol.config import run_file
from trainctl.protocol.config.model_facts import ModelFacts, read_facts
from trainctl.protocol.config.names import node_name, state_root
from trainctl.protocol.config.run_tables import NodeTable, RunFile, micro_of, micro_tokens_of
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.devices import read_devices, resolve, unsuited
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.text.formatting import gigabytes

_GPU_FILES: Final = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
"""Devices that are there with an NVIDIA or AMD driver on Linux, and with a GPU under WSL."""


@dataclass(frozen=True)
class RecordedRates:
    """The speed and the memory of a node in one run."""

    run: str
    tokens_per_second: float  # without the first step, which warms up
    peak_bytes: float | None  # of its trainer, the largest of all steps; None: not known


@dataclass(frozen=True)
class MemoryReport:
    """The model and the memory of one run."""

    family: str
    nodes: dict[str, MemoryEstimate]
    measured: dict[str, RecordedRates]  # of nodes whose peak a run with these settings has recorded on this machine
    warnings: tuple[str, ...] = ()

    @property
    def plain(self) -> dict[str, Any]:
        """The report as JSON has it."""
        first = next(iter(self.nodes.values()))
        return {
            "family": self.family,
            "parameters": first.parameters,
            "trained": first.trained,
            "gradient_bytes": first.gradient_bytes,
            "warnings": self.warnings,
            "memory": {node: {**found.parts, "total": found.total} for node, found in self.nodes.items()},
            "measured": {
                node: {"run": found.run, "peak_bytes": found.peak_bytes} for node, found in self.measured.items()
            },
        }


def report_of(config: RunFile, nodes: Sequence[str], where: str, here: Sequence[str] = ()) -> MemoryReport | None:
    """Return the report of a run's nodes. `here` are those of them that are this machine. None if no node's model is on
    this machine, or it doesn't state its sizes. Raises InvalidInputError for adapters of layers that the model doesn't
    have."""
    names = tuple(nodes) or ("",)
    if nodes:
        config = msgspec.structs.replace(config, nodes={name: config.nodes.get(name, NodeTable()) for name in nodes})
    facts = facts_here(config, names, where)
    if facts is None or not facts.shapes:
        return None
    slow = unsuited(config, {name: read_devices() for name in here})
    config = _in_one_type(config, here, where) if here else config
    estimates, measured, devices = {}, {}, set[str]()
    for name in names:
        placed, backend = _placed(config, name)
        devices.add(placed.device)
        estimates[name] = estimate_memory(run_file.on_node(config, name), facts, placed, backend, where)
        found = newest_like(config, name or node_name())
        if found is not None and found.peak_bytes is not None:
            measured[name] = found
    return MemoryReport(facts.family, estimates, measured, (*fit_warnings(config, facts, where, devices), *slow))


def memory_lines(config: RunFile, facts: ModelFacts, nodes: Sequence[str], where: str) -> dict[str, MemoryModel]:
    """Return what each node's rank holds by its micro-batch, outside a group. Raises InvalidInputError for adapters of
    layers that the model doesn't have."""
    lines = {}
    for name in nodes:
        placed, backend = _placed(config, name)
        alone = msgspec.structs.replace(run_file.on_node(config, name), nodes={})
        lines[name] = estimated_line(alone, facts, placed, backend, where)
    return lines


def _placed(config: RunFile, name: str) -> tuple[NodeTable, Literal["mlx", "torch"]]:
    """Return a node's table with the device and the backend that it gets."""
    table = config.nodes.get(name, NodeTable())
    prefers: Literal["mlx", "torch"] = (
        "mlx" if sys.platform == "darwin" and not run_file.needs_torch(config) else "torch"
    )
    backend = table.backend if table.backend != "auto" else prefers
    return msgspec.structs.replace(table, device=_device(table, backend)), backend


def _in_one_type(config: RunFile, here: Sequence[str], where: str) -> RunFile:
    """Put the type that this machine's ranks choose in place of "auto", if its devices are known."""
    tables = {name: config.nodes.get(name, NodeTable()) for name in here}
    try:
        found, _ = resolve(msgspec.structs.replace(config, nodes=tables), dict.fromkeys(here, read_devices()), where)
    except InvalidInputError:
        return config
    return msgspec.structs.replace(config, model=found.model)


def _device(table: NodeTable, backend: str) -> str:
    """Return what "auto" is on this machine; another one is taken to be like it."""
    has_gpu = sys.platform == "darwin" or any(Path(file).exists() for file in _GPU_FILES)
    return "cpu" if table.device == "auto" and backend == "torch" and not has_gpu else table.device


def facts_here(config: RunFile, nodes: Sequence[str], where: str) -> ModelFacts | None:
    """Return the facts of the first node's model that is on this machine; None if there is none, or it doesn't state
    its sizes."""
    for name in nodes:
        model = Path(run_file.on_this_machine(config, name).model.path)
        if (model / "config.json").is_file():
            return read_facts(model, f"{where}: model.path")
    return None


def report_lines(report: MemoryReport) -> list[str]:
    """Return one fact per line."""
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
        if node in report.measured:
            peak = gigabytes(report.measured[node].peak_bytes)
            lines.append(f"measured memory{place}: {peak} GB at the peak of {report.measured[node].run}")
    return [*lines, *report.warnings]


_MOST_RUNS = 200
"""The newest so many of this machine's runs are looked at."""


def newest_like(config: RunFile, node: str, root: Path | None = None) -> RecordedRates | None:
    """Return the rates of the newest run of at least two steps whose model, data, micro-batch and device on `node` are
    those of `config`."""
    wanted = _settings(config, node)
    for directory in _newest_first(root or state_root()):
        try:
            if _settings(run_file.read(RunPaths(directory).run_file), node) == wanted:
                with RecordReader(directory) as record:
                    found = _measured(record, node)
                if found is not None:
                    return found
        except InvalidInputError:
            continue  # of another version of this program, or damaged
    return None


def _settings(config: RunFile, node: str) -> list[Any]:
    """Return what a rank's speed and memory depend on, but for its share."""
    own, here = config.nodes.get(node, NodeTable()), run_file.on_node(config, node)
    data = here.data
    return [
        here.model,
        config.adapter,
        config.objective,
        data.path,
        data.kind,
        data.tokenizer,
        data.sequence_length,
        data.packing,
        micro_of(config, own),
        micro_tokens_of(config, own),
        own.backend,
        own.device,
        own.threads,
        own.memory_limit_gb,
        len(config.nodes) > 1,
    ]


def _newest_first(root: Path) -> Iterator[Path]:
    found = root.glob(f"*/{runs_directory(Path()).name}/*/{RunPaths(Path()).record.name}")
    yield from (record.parent for record in sorted(found, key=_changed_at, reverse=True)[:_MOST_RUNS])


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _measured(record: RecordReader, node: str) -> RecordedRates | None:
    (first, *_), totals = record.steps(limit=1)[0] or (None,), record.totals()
    last = record.last_step()
    if first is None or last is None or node not in totals.tokens_by_node:
        return None
    seconds = totals.step_seconds - first.step_seconds
    tokens = totals.tokens_by_node[node] - sum(
        part.tokens for part in record.rank_steps(first.step) if part.node == node
    )
    if tokens <= 0 or seconds <= 0:
        return None
    ranks = (part.rank for part in record.rank_steps(last.step) if part.node == node)
    peaks = [peak for rank in ranks for peak in record.series("memory_peak_bytes", rank, columns=1).maximum]
    return RecordedRates(record.run, tokens / seconds, max(peaks, default=None))
