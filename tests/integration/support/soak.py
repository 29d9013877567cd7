"""Use of a machine by a long run: memory, descriptors and disk, read while it is disturbed, and whether they are
flat. The reading is done to live processes, the judging is pure."""

import contextlib
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from tests.cluster.run_files import NODES
from tests.integration.support.clusters import Cluster
from tests.integration.support.faults import takes_part

from trainctl.protocol import messages as m

READING_SECONDS = 1.0
RIPE_SECONDS = 10.0
"""A process of this age has loaded what it needs and found its peers."""
MB = 1_000_000
AGENT_BYTES, TRAINER_BYTES = 8 * MB, 24 * MB
"""Bytes by which a late agent or trainer may be larger than an early one. An agent keeps the last 10,000 messages of
about 1 kB for clients that missed some; a trainer's differs by what its allocator happened to get."""
RECORD_BYTES_A_STEP = 6_000
"""Most bytes that all nodes' records may have of each step: its plan, its rows and rollups, what trainers write."""
SQLITE_LOG_BYTES, SQLITE_LOGS = 6 * MB, 2 * len(NODES)
"""Most bytes of a record's write-ahead log, which is folded into the record at 4 MiB; each node writes two records."""
LOG_BYTES_A_STEP = 500
"""Most bytes per start of what trainers print, by which each start adds some lines."""


@dataclass(frozen=True)
class Process:
    """One agent or trainer at one moment; `children` are all processes below it."""

    kind: Literal["agent", "trainer"]
    node: str
    pid: int
    age_seconds: float
    rss_bytes: int
    descriptors: int
    children: int


@dataclass(frozen=True)
class Reading:
    """`whole`: all ranks took part. `disk_bytes` of all nodes' run directories: "record", "sqlite log", "checkpoints",
    "logs" and "other"."""

    at_seconds: float
    step: int
    whole: bool
    processes: tuple[Process, ...]
    disk_bytes: dict[str, int]


# ---------------------------------------------------------------- reading


class Meter:
    """Reads about once a second, whenever it is shown the run."""

    def __init__(self, cluster: Cluster, run: str) -> None:
        self._cluster, self._run, self._began = cluster, run, time.monotonic()
        self.readings: list[Reading] = []

    def __call__(self, view: m.RunView) -> None:
        at = time.monotonic() - self._began
        if self.readings and at < self.readings[-1].at_seconds + READING_SECONDS:
            return
        pids: list[tuple[Literal["agent", "trainer"], str, int]] = [
            ("agent", node, agent.process.pid) for node, agent in self._cluster.agents.items() if agent.process
        ]
        pids += [("trainer", rank.node, rank.pid) for rank in view.ranks if rank.pid is not None]
        found = [process for which in pids if (process := read_process(*which)) is not None]
        self.readings.append(Reading(at, view.step, takes_part(view, NODES), tuple(found), self._disk()))

    def _disk(self) -> dict[str, int]:
        taken = dict.fromkeys(("record", "sqlite log", "checkpoints", "logs", "other"), 0)
        for node in NODES:
            top = self._cluster.run_paths(node, self._run).directory
            # Not by rglob, which fails if a folder goes meanwhile, as an old checkpoint's does.
            for file in (Path(folder, name) for folder, _, names in os.walk(top) for name in names):
                with contextlib.suppress(OSError):
                    taken[purpose(file.relative_to(top))] += file.stat().st_size
        return taken


def purpose(file: Path) -> str:
    """Return what a file of a run directory is for, as `Reading.disk_bytes` has it."""
    if file.parts[0] in ("checkpoints", "logs"):
        return file.parts[0]
    return {".db": "record", ".db-wal": "sqlite log"}.get(file.suffix, "other")


def read_process(kind: Literal["agent", "trainer"], node: str, pid: int) -> Process | None:
    """None if it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            age_seconds = time.time() - process.create_time()
            children = len(process.children(recursive=True)) if kind == "trainer" else 0
            return Process(kind, node, pid, age_seconds, process.memory_info().rss, descriptors(pid), children)
    except (psutil.Error, OSError):
        return None


def descriptors(pid: int) -> int:
    """Return how many it has open. One database file counts once: SQLite keeps a closed reader's descriptor of it for
    the next reader, so that there are as many as ever read at once; a connection that is left open shows by its log's.
    """
    links = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(link.readlink())
    databases = [link for link in links if link.suffix == ".db"]
    return len(links) - len(databases) + len({*databases})


# ---------------------------------------------------------------- judging: pure


def not_flat(readings: Sequence[Reading]) -> list[str]:
    """Return what has grown from the first third of the readings' steps to the last by more than it should, a line
    each; empty if all is flat. Processes are compared while the group is whole."""
    first, last = readings[0].step, readings[-1].step
    early = [reading for reading in readings if reading.step <= first + (last - first) / 3]
    late = [reading for reading in readings if reading.step >= last - (last - first) / 3]
    found = [*_grown_disk(early[-1], readings[-1])]
    for kind, bound in (("agent", AGENT_BYTES), ("trainer", TRAINER_BYTES)):
        for node in NODES:
            found += _grown(f"{kind} of {node}", ripe(early, kind, node), ripe(late, kind, node), bound)
    return found


def ripe(readings: Sequence[Reading], kind: str, node: str) -> list[Process]:
    """The processes of one kind and node that are not just starting, in a group that is whole."""
    all_of = [process for reading in readings if reading.whole for process in reading.processes]
    return [one for one in all_of if (one.kind, one.node) == (kind, node) and one.age_seconds >= RIPE_SECONDS]


def _grown(what: str, early: Sequence[Process], late: Sequence[Process], bound: int) -> list[str]:
    if not early or not late:
        return [f"nothing to compare: {len(early)} early and {len(late)} late readings of the {what}"]
    found = []
    memory = [statistics.median(one.rss_bytes for one in those) for those in (early, late)]
    if memory[1] > memory[0] + bound:
        found.append(f"memory of the {what} went from {memory[0] / MB:.1f} to {memory[1] / MB:.1f} MB")
    for name in ("descriptors", "children"):
        # The one most often seen: a file that is just being written, or a client's question, is open for a moment.
        counts = [statistics.mode(getattr(one, name) for one in those) for those in (early, late)]
        if counts[1] > counts[0]:
            found.append(f"{name} of the {what} went from {counts[0]} to {counts[1]}")
    return found


def _grown_disk(early: Reading, late: Reading) -> list[str]:
    steps = late.step - early.step
    bounds = {
        "record": MB + RECORD_BYTES_A_STEP * late.step,  # from the first step on, for the logs have a part of it
        "sqlite log": SQLITE_LOGS * SQLITE_LOG_BYTES,
        "checkpoints": 1.5 * max(early.disk_bytes["checkpoints"], MB),
        "logs": early.disk_bytes["logs"] + MB // 10 + LOG_BYTES_A_STEP * steps,
        "other": early.disk_bytes["other"] + MB,
    }
    return [
        f"{name} took {late.disk_bytes[name] / MB:.1f} MB at step {late.step}, of {bound / MB:.1f} MB at most"
        for name, bound in bounds.items() if late.disk_bytes[name] > bound
    ]  # fmt: skip


def summary(readings: Sequence[Reading]) -> list[str]:
    """Return what was read, a line for each kind of process of each node and one for the disk: first, last and most."""
    lines = []
    for kind in ("agent", "trainer"):
        for node in NODES:
            those = ripe(readings, kind, node)
            if those:
                memory = ", ".join(f"{one.rss_bytes / MB:.1f}" for one in (those[0], those[-1], max(those, key=_rss)))
                counts = f"{those[0].descriptors} to {those[-1].descriptors} descriptors"
                lines.append(f"{kind} of {node}: {memory} MB (first, last, most), {counts}")
    disk = [(name, readings[0].disk_bytes[name], readings[-1].disk_bytes[name]) for name in readings[0].disk_bytes]
    return [*lines, "disk: " + ", ".join(f"{name} {was / MB:.1f} to {now / MB:.1f} MB" for name, was, now in disk)]


def _rss(process: Process) -> int:
    return process.rss_bytes
