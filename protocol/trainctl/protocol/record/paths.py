"""Paths of a node's runs and caches of reference log-probabilities."""

import contextlib
import json
import stat
from collections import Counter
from pathlib import Path
from typing import Any, Final

from trainctl.protocol.config.names import state_root
from trainctl.protocol.security import received_names


def inputs_directory() -> Path:
    """Copies of standard input that runs train on; no node has this name."""
    return state_root() / ".inputs"


def runs_directory(node_dir: Path) -> Path:
    return node_dir / "runs"


class RunPaths:
    """The files of one run directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.run_file = directory / "run.toml"
        self.name_file = directory / "name"
        self.record = directory / "record.db"
        self.checkpoints = directory / "checkpoints"
        self.logs = directory / "logs"
        self.profiles = directory / "profiles"

    @property
    def given_name(self) -> str:
        """The name that the run was given later; empty if it was given none."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return self.name_file.read_text("utf-8").strip()
        return ""

    @property
    def size_bytes(self) -> int:
        """Bytes of the disk that its removal frees: files that a branch or its parent has too don't count, nor do those
        that go meanwhile."""
        links, sizes = Counter[int](), dict[int, tuple[int, int]]()
        for path in self.directory.rglob("*"):
            with contextlib.suppress(OSError):
                kept = path.lstat()
                links[kept.st_ino] += 1
                sizes[kept.st_ino] = (1 if stat.S_ISDIR(kept.st_mode) else kept.st_nlink), 512 * kept.st_blocks
        return sum(size for number, (everywhere, size) in sizes.items() if links[number] == everywhere)

    @property
    def node_data(self) -> Path:
        """Token caches, shared by all runs of the node: `<node folder>/data`."""
        return self.directory.absolute().parent.parent / "data"

    def rank_record(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.db"

    def status_page(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.status"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def process(self, rank: int) -> Path:
        """Return the file that says which process runs the rank: written by the shim (pid, start time, boot id, and at
        the end the exit status)."""
        return self.directory / f"rank-{rank}.process.json"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"


VALUES_NAME: Final = "values.bin"
"""Little-endian float32."""
NOTES_NAME: Final = "reference.json"
"""The model and data that the values are of, and their SHA-256 digest."""


def stored_digest(folder: Path) -> str:
    """The digest of a folder's values; empty if it holds none that can be read."""
    try:
        with received_names.opened(folder, NOTES_NAME) as file:
            notes: Any = json.load(file)
        found = notes["digest"] if (folder / VALUES_NAME).is_file() else ""
    except (OSError, ValueError, TypeError, KeyError):
        return ""
    return found if isinstance(found, str) else ""
