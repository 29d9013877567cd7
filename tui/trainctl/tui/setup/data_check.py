"""A run's data read to their end, as its trainers will read them, before the run is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainctl.protocol.batch.data_statistics import ReferenceState, data_size, epoch_samples
from trainctl.protocol.batch.settings_rules import DataSize
from trainctl.protocol.config import run_file
from trainctl.protocol.config.data_files import data_files
from trainctl.protocol.config.objectives import caches_reference
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import Collected, InvalidInputError
from trainctl.tui.setup import data_preview, init_probe

MOST_BYTES = 64_000_000
"""Bytes of data up to which they are read: a few seconds."""
NOT_READ = "data not read here: run `trainctl data preview`"


def with_steps(file: Path, overrides: Mapping[str, str]) -> dict[str, str]:
    """Return the overrides with `run.steps` in place of a run file's epochs: its data are counted as a trainer of this
    machine reads them. Raises InvalidInputError."""
    config = run_file.read(file, dict(overrides))
    if not config.run.epochs:
        return dict(overrides)
    steps = run_file.with_steps(config, epoch_here(file, config, overrides)).run.steps
    others = {key: value for key, value in overrides.items() if key != "run.epochs"}
    return {**others, "run.steps": str(steps)}


def epoch_here(file: Path, config: RunFile, overrides: Mapping[str, str]) -> int:
    """Return the samples of an epoch of a run file, which with these overrides is `config`, as a trainer of this
    machine counts them. Raises InvalidInputError."""
    node = next((name for name in [*config.nodes] or [""] if _is_here(config, name)), None)
    if node is None or not init_probe.backends():
        problem = "an epoch's samples are counted here, with the data and PyTorch or MLX: give run.steps instead"
        raise InvalidInputError(f"{file}: run.epochs", problem)
    return epoch_samples(data_preview.read(file, node, 0, overrides))


def _is_here(config: RunFile, node: str) -> bool:
    here = run_file.on_node(config, node)
    return any(data_files(Path(here.data.path), here.data.kind))


@dataclass(frozen=True)
class DataRead:
    """The data of a run, as far as they were read."""

    unread: str = ""  # why the data were not read; empty: they were
    # By node, where the reference is computed before the first step.
    references: Mapping[str, ReferenceState] = field(default_factory=dict)
    size: DataSize | None = None  # None: not counted


def read(config: RunFile, file: Path, nodes: Sequence[str], overrides: Mapping[str, str]) -> DataRead:
    """Read the data as each of `nodes`, which are this machine, has them: once where several have the same. They aren't
    read if they are large, on other machines or no trainer's library is here. Raises InvalidInputError with everything
    wrong."""
    own = {}
    caches = caches_reference(config.objective, has_adapter=config.adapter.kind != "full")
    for node in nodes:
        here = run_file.on_node(config, node)
        own[here.model.path, here.data.path, here.data.held_out_path, node if caches else ""] = node
    large = any(_bytes(run_file.on_node(config, node)) > MOST_BYTES for node in own.values())
    if large or not own or not init_probe.backends():
        return DataRead(NOT_READ)
    wrong, references, size = Collected(), dict[str, ReferenceState](), None
    for node in own.values():
        if not _waits(run_file.on_node(config, node)):
            with wrong.going_on():
                found = data_preview.read(file, node, 0, overrides)
                references |= {node: found.reference} if found.reference is not None else {}
                size = None if found.growing else data_size(found)
    wrong.raise_any()
    return DataRead("", references, size)


def _bytes(config: RunFile) -> int:
    """Return the size of the data and the held-out files."""
    held_out = run_file.held_out_data(config)
    return sum(
        path.stat().st_size
        for one in (config, *([held_out] if held_out is not None else []))
        for path in data_files(Path(one.data.path), one.data.kind)
    )


def _waits(config: RunFile) -> bool:
    """Return whether the data are a growing file without a whole line yet."""
    return run_file.grows(config) and b"\n" not in Path(config.data.path).read_bytes()
