"""A run's data read to their end, as its trainers will read them, before the run is started."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from trainctl.protocol.batch.data_statistics import ReferenceState
from trainctl.protocol.config import run_file
from trainctl.protocol.config.data_files import data_files
from trainctl.protocol.config.objectives import caches_reference
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import Collected
from trainctl.tui.setup import data_preview, init_probe

MOST_BYTES = 64_000_000
"""Bytes of data up to which they are read: a few seconds."""
NOT_READ = "data not read here: run `trainctl data preview`"


class DataRead(NamedTuple):
    """What came of it."""

    unread: str = ""  # why the data were not read; empty: they were
    references: Mapping[str, ReferenceState] = MappingProxyType(
        {}
    )  # by node, where the reference is computed before the first step


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
    wrong, references = Collected(), dict[str, ReferenceState]()
    for node in own.values():
        if not _waits(run_file.on_node(config, node)):
            with wrong.going_on():
                found = data_preview.read(file, node, 0, overrides)
                references |= {node: found.reference} if found.reference is not None else {}
    wrong.raise_any()
    return DataRead("", references)


def _bytes(config: RunFile) -> int:
    """Of the data and the held-out files."""
    held_out = run_file.held_out_data(config)
    return sum(
        path.stat().st_size
        for one in (config, *([held_out] if held_out is not None else []))
        for path in data_files(Path(one.data.path), one.data.kind)
    )


def _waits(config: RunFile) -> bool:
    """Whether the data are a growing file without a whole line yet."""
    return run_file.grows(config) and b"\n" not in Path(config.data.path).read_bytes()
