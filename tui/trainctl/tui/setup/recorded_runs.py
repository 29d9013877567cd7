"""The rates and memory that this machine's runs measured with the settings of a run file."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.protocol.config import run_file
from trainctl.protocol.config.micro_batches import micro_of, micro_tokens_of
from trainctl.protocol.config.names import state_root
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths, runs_directory
from trainctl.protocol.record.reader import RecordReader

_MOST_RUNS = 200
"""The newest so many of this machine's runs are looked at."""


@dataclass(frozen=True)
class RecordedRates:
    """By a node in one run."""

    run: str
    tokens_per_second: float  # without the first step, which warms up
    peak_bytes: float | None  # of its trainer, the largest of all steps; None: not known


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
