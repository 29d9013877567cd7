"""The files of a run's data as they are on this machine, with digests that `sha256sum` prints too."""

from pathlib import Path
from typing import NamedTuple

from trainctl.protocol.config.data_files import data_files, glob_root, is_glob
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.record.checkpoints import digest_of

MAX_FILES = 64
"""Files that are listed; of more, the first ones."""


class DataFile(NamedTuple):
    """One file."""

    name: str  # from the data's folder
    sha256: str  # of its content, in hexadecimal


def read_data_files(config: RunFile) -> tuple[DataFile, ...]:
    """Those of the data, then the held-out ones; () if they aren't on this machine. Raises OSError."""
    nodes = [*config.nodes.values()]
    places = (
        [config.data.path, *(node.data_path for node in nodes)],
        [config.data.held_out_path, *(node.held_out_path for node in nodes)],
    )
    found: list[DataFile] = []
    for paths in places:
        there = (files for path in paths if path and (files := _files(Path(path), config)))
        found += [DataFile(name, digest_of(file)) for name, file in next(there, [])[: MAX_FILES - len(found)]]
    return tuple(found)


def _files(path: Path, config: RunFile) -> list[tuple[str, Path]]:
    root = path if path.is_dir() else glob_root(path) if is_glob(path) else path.parent
    files = [file for file in data_files(path, config.data.kind) if file.is_file()]
    return [(file.relative_to(root).as_posix(), file) for file in files]
