"""Run directories for reports: a simulated run with a fault, whose record also has what no simulation makes."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import msgspec
from tests.node_agent.support import scenarios
from tests.tui.support.run_directory import sample

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.checkpoints import (
    CheckpointMetadata,
    Environment,
    Lineage,
    Manifest,
    ParentCheckpoint,
    Performance,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

STEPS = 120
FAILS_AT = 20
NODES = {
    "a": {"samples_per_second": 8.0}, "b": {"samples_per_second": 4.0, "fails_at": [FAILS_AT], "load_seconds": 5.0},
    "c": {"samples_per_second": 6.0},
}  # fmt: skip
SECRET = "hunter-two"
HOSTILE = "</title><script>alert(1)</script>\x1b[31m | [x](https://example.org) *`_"
DIGEST = "ab" * 32


def make(folder: Path) -> Path:
    """A finished run of three nodes, one of which fails once."""
    simulation, _ = scenarios.simulate(folder, NODES, steps=STEPS, seed=7)
    paths = simulation.paths
    text = (folder / "run.toml").read_text("utf-8")
    paths.run_file.write_text(f'{text}\n[nodes.a.env]\nTOKEN = "{SECRET}"\n', "utf-8")
    with RecordReader(paths) as reader:
        step = reader.steps(59, 1)[0][0]
        run, at, end = reader.run, step.committed_at, reader.last_step()
        view = msgspec.json.decode(reader.meta("view") or "", type=m.RunView)
    assert end is not None
    with RunDb(paths, resumable=False) as recorder:
        recorder.event(at, e.NoteWritten(HOSTILE), "info", "anna", step=60, verb="note", outcome="applied")
        recorder.event(at, e.PolicyAdvised("drain", "drain b", "b costs 3.1 %"), "info", "auto:drain", step=60)
        failed = e.CommandFailed("no node zeta")
        recorder.event(at, failed, "warning", "anna", step=60, verb="drain", outcome="rejected")
        recorder.event(at, e.CheckpointWritten(60, 1000, 0.25), "good", "a", step=60)
        recorder.event(at, e.RunBranched(run, 60, "other-1", "a"), "info", "anna", step=60)
        for number, answer in ((10, "early answer"), (60, HOSTILE)):
            recorder.sample(sample(run, number, at + number, "Why?", answer))
        for node in NODES:
            recorder.host(reading(node, view.started_at, end.committed_at))
        cost = m.RunCost("EUR", 1.25, end.committed_at, 0.0, ("b",))
        known = msgspec.structs.replace(view, cost=cost, branch=m.BranchPoint("parent-1", 5, 60))
        recorder.set_meta("view", msgspec.json.encode(known).decode(), own=True)
    checkpoint(paths, STEPS)
    return paths.directory


def reading(node: str, began_at: float, at: float) -> m.HostReading:
    """3,600 joules on each node, over the whole run."""
    return m.HostReading(
        node=node, read_at=at, cpu_percent=50.0, memory_used_bytes=1, memory_total_bytes=2, disk_free_bytes=3,
        energy_joules=3600.0, energy_since_at=began_at,
    )  # fmt: skip


def checkpoint(paths: RunPaths, step: int, parent: ParentCheckpoint | None = None) -> None:
    """The files of a checkpoint that say what was trained with what, and what the run branched off."""
    folder, run = paths.checkpoint(step), paths.directory.name
    folder.mkdir(parents=True)
    where = Environment(
        node="a", program="0.2.0", python="3.11.7", library="torch 2.9.1", device="cpu", system="Linux x86_64"
    )
    about = CheckpointMetadata(
        recipe={}, performance=Performance(), lineage=Lineage(run=run, parent=parent), environment=where
    )
    manifest = Manifest(run=run, step=step, written_at=0.0, files={}, metadata=about)
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))
    (folder / "state.json").write_text(json.dumps({"samples": 512, "data_digest": DIGEST, "seed": 0}), "utf-8")


def copied(directory: Path, name: str, change: Callable[[RunPaths], None]) -> Path:
    """A copy beside it with something planted."""
    made = directory.with_name(name)
    shutil.copytree(directory, made)
    change(RunPaths(made))
    return made


def with_sql(*statements: str) -> Callable[[RunPaths], None]:
    """Return what changes the rows of a record."""

    def change(paths: RunPaths) -> None:
        with sqlite3.connect(paths.record) as connection:
            for statement in statements:
                connection.execute(statement)
        connection.close()

    return change
