"""A report of a run of 100,000 steps on three ranks: its size, and the time that `trainctl report` takes from start to
end, beside that of a bare read of all its rows by SQL.

The record has an intervention every 200 steps, a checkpoint every 100, a fault every 1,000. Exit status 1 if the page
has 2 MB or more, or takes 3 s or longer.
"""

import argparse
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from lib import long_record

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.messages import Generation
from trainctl.protocol.messages.events import (
    CheckpointWritten,
    GenerationFormed,
    GenerationLeft,
    RankChanged,
    SharesChanged,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

MOST_SECONDS, MOST_BYTES = 3.0, 2_000_000
CHANGES_EVERY, CHECKPOINTS_EVERY, FAULTS_EVERY = 200, 100, 1_000
_READ = "SELECT sum(r.sync_seconds), sum(s.loss) FROM rank_steps r JOIN steps s USING (step, term, n)"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the record is kept for the next time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as passing:
        directory = long_record.make(options.folder or Path(passing), options.steps, options.ranks)
        complete(RunPaths(directory), options.steps)
        page = Path(passing) / "report.html"
        read = timed(lambda: read_all(directory / "record.db"))
        wall = timed(lambda: report(directory, page))
        cpu = sum(os.times()[2:4])  # of children: the report's process alone
        size = page.stat().st_size
    print(f"report of {options.steps:,} steps on {options.ranks} ranks: {size:,} bytes")
    print(f"{wall:.2f} s, of which {cpu:.2f} s of CPU time; all rows are read by SQL in {read:.2f} s")
    return int(wall >= MOST_SECONDS or size >= MOST_BYTES)


def timed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def read_all(record: Path) -> None:
    connection = sqlite3.connect(record)
    connection.execute(_READ).fetchall()
    connection.close()


def report(directory: Path, page: Path) -> None:
    command = [sys.executable, "-m", "trainctl.tui.cli.main", "report", str(directory), "--html", str(page)]
    subprocess.run(command, check=True)


def complete(paths: RunPaths, steps: int) -> None:
    """Make the record with events, unless an earlier time left them."""
    with RecordReader(paths) as reader:
        last = reader.last_step()
        assert last is not None
        parts, known = reader.rank_steps(last.step), reader.events(limit=1)[0]
    if known:
        return
    with RunDb(paths, resumable=False) as recorder:
        for step in range(CHECKPOINTS_EVERY, steps + 1, CHECKPOINTS_EVERY):
            add_events(
                recorder,
                step,
                last.committed_at + (step - steps) * long_record.STEP_SECONDS,
                [one.node for one in parts],
            )


def add_events(recorder: RunDb, step: int, at: float, nodes: list[str]) -> None:
    recorder.event(at, CheckpointWritten(step, 10**9, 0.1), "good", nodes[0], step=step)
    shares = {node: 8 + (step // CHANGES_EVERY + place) % 3 for place, node in enumerate(nodes)}
    if step % CHANGES_EVERY == 0:
        change = SharesChanged(shares, shares | {nodes[0]: 9})
        recorder.event(at, change, "info", "auto:rebalance", step=step, verb="rebalance", outcome="applied")
    if step % FAULTS_EVERY == 0:
        generation = Generation(1, step // FAULTS_EVERY)
        recorder.event(at, RankChanged((nodes[-1],), "failed", "was ended by signal 9"), "error", "auto", step=step)
        recorder.event(at, GenerationLeft(generation, "a rank died"), "warning", "auto", step=step)
        formed = GenerationFormed(generation, len(nodes) - 1, waited_seconds=0.5)
        recorder.event(at + 0.5, formed, "info", "auto", step=step)


if __name__ == "__main__":
    sys.exit(main())
