"""A demo's files: the model and text that all demos share, and a folder a demo that is dropped later."""

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, Literal, Self

import platformdirs
import tomli_w

from trainctl.protocol.config.names import agent_address, node_directory
from trainctl.protocol.files.durable_files import write_file

Objective = Literal["pretrain", "sft", "dpo", "qlora"]
PREFIX = "demo-"
BYTES_PER_SAMPLE = 128
SAMPLES_PER_STEP = 24
MICRO_BATCH = 8
WARMUP_STEPS = 10
EVALUATE_EVERY = 50
KEPT_DEMOS = 3
"""Demos that are over whose records stay, for `trainctl replay` and the like."""
MIN_AGE_SECONDS = 120.0
"""A younger folder is left alone: its supervisor may be about to take the lock, its trainer about to notice the end."""


_DATA: Final[dict[Objective, str]] = {"pretrain": "data", "sft": "rows", "dpo": "pairs", "qlora": "rows"}
_ADAPTER: Final = {"kind": "lora", "rank": 8, "alpha": 16.0}
_CHANGES: Final[dict[Objective, dict[str, dict[str, Any]]]] = {
    "dpo": {
        "data": {"sequence_length": 192, "held_out": 0.01},
        "batch": {"global": 8, "micro": 4},  # pairs
        "optimizer": {"learning_rate": 2e-3},
        "adapter": _ADAPTER,
        "objective": {"kind": "dpo"},
    },
    "qlora": {"model": {"base": "mlx-4bit"}, "adapter": _ADAPTER},
}
"""Settings that differ from the others'."""


def default_folder() -> Path:
    """Return the user's cache folder for demos."""
    return platformdirs.user_cache_path("trainctl") / "demo"


class Session:
    """One demo's folder. Its lock is held by the supervisor and the agents, so it is free once all are gone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.run_file = folder / "run.toml"
        self.cluster_file = folder / "cluster.toml"
        self.supervisor_log = folder / "supervisor.log"
        self._lock = folder / "demo.lock"
        self._keep = folder / "keep"
        self._held: IO[bytes] | None = None

    @classmethod
    def create(cls, root: Path, *, keep: bool) -> Self:
        """Return a new one in `root`, after dropping those of ended demos that were not to be kept."""
        drop_ended(root)
        session = cls(root / f"{PREFIX}{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        session.folder.mkdir(parents=True)
        session._lock.touch()
        if keep:
            session._keep.touch()
        return session

    def agent_log(self, node: str) -> Path:
        return self.folder / f"agent-{node}.log"

    def write_cluster(self, nodes: Sequence[str], runtime: Path | None = None) -> dict[str, str]:
        """Give each node the address of a Unix socket, in `runtime` or where its agent has others, and write the
        cluster file."""
        chosen = {
            node: f"ipc://{runtime}/{node}.sock" if runtime else agent_address(node_directory(node, self.state))
            for node in nodes
        }
        tables = {node: {"address": address} for node, address in chosen.items()}
        write_file(self.cluster_file, tomli_w.dumps({"nodes": tables}).encode())
        return chosen

    @contextlib.contextmanager
    def locked(self) -> Iterator[Self]:
        """Hold the lock. Raises BlockingIOError if another supervisor does."""
        with self._lock.open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._held = held
            yield self

    def lock_descriptors(self) -> tuple[int, ...]:
        """Return what a child inherits to hold the lock too."""
        return (self._held.fileno(),) if self._held is not None else ()

    def is_droppable(self, now: float) -> bool:
        """Return whether it is a demo's folder, over, and not to be kept."""
        if self._keep.exists() or not self._lock.is_file() or now - self._lock.stat().st_mtime < MIN_AGE_SECONDS:
            return False
        with self._lock.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
        return True


def drop_ended(root: Path) -> None:
    """Remove the folders of demos that are over, but the newest KEPT_DEMOS."""
    folders = sorted(root.glob(f"{PREFIX}*")) if root.is_dir() else []
    ended = [
        folder
        for folder in folders
        if folder.is_dir() and not folder.is_symlink() and Session(folder).is_droppable(time.time())
    ]
    for folder in ended[:-KEPT_DEMOS]:
        shutil.rmtree(folder, ignore_errors=True)


def run_config(assets: Path, nodes: Mapping[str, str], steps: int, objective: Objective = "pretrain") -> dict[str, Any]:
    """Return the demo's run file as plain values, checked; `nodes` are the ranks in order, with what computes on each.

    Several share this machine: a thread each.
    """
    table: dict[str, Any] = {"threads": 1} if len(nodes) > 1 else {}
    raw: dict[str, Any] = {
        "run": {"name": "demo", "steps": steps, "orphan_seconds": 30.0},
        "model": {"path": str(assets / ("quantized" if objective == "qlora" else "model"))},
        "data": {
            "path": str(assets / _DATA[objective]),
            "tokenizer": "bytes",
            "kind": "text" if objective == "pretrain" else "rows",
            "sequence_length": BYTES_PER_SAMPLE,
            "held_out": 0.001,
            "overlong": "drop",
        },
        "batch": {"global": SAMPLES_PER_STEP, "micro": MICRO_BATCH},
        "optimizer": {
            "learning_rate": 4e-3,
            "schedule": "cosine",
            "warmup_steps": min(WARMUP_STEPS, steps - 1),
            "clip_norm": 1.0,
        },
        "evaluate": {"every_steps": EVALUATE_EVERY},
        "nodes": {name: {"backend": backend, **table} for name, backend in nodes.items()},
    }
    for name, changes in _CHANGES.get(objective, {}).items():
        raw[name] = raw.get(name, {}) | changes
    from trainctl.protocol.config import run_file  # its rules take long to load: not for `trainctl ls`

    return run_file.to_dict(run_file.parse(raw, "demo"))


def write_run_file(session: Session, config: dict[str, Any]) -> None:
    """Keep the run file beside the run: it is the example a newcomer starts from."""
    write_file(session.run_file, tomli_w.dumps(config).encode())
