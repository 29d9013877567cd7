"""A run directory with a record of very many steps, made from the shipped recording by the record's own writer."""

import shutil
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from trainctl.node_agent import record_writes as writes
from trainctl.node_agent import recording as recordings
from trainctl.node_agent.recorder import RunRecorder
from trainctl.node_agent.story import Story
from trainctl.protocol.metrics import rebuild_rollups
from trainctl.protocol.paths import RunPaths
from trainctl.protocol.reader import RecordReader
from trainctl.protocol.record import RUN_SCHEMA, open_for_writing

PAGE = 10_000
STEP_SECONDS = 0.5
WHOLE = "long-record"
"""The key that says that a record was made to its end."""


def make(folder: Path, steps: int, ranks: int) -> Path:
    """The run directory in `folder`, made unless it is there already; rows by the million, rollups once."""
    directory = folder / f"long-{steps}x{ranks}"
    paths = RunPaths(directory)
    if paths.record.is_file():
        with RecordReader(paths) as reader:
            if reader.meta(WHOLE) == str(steps):
                return directory
        shutil.rmtree(directory)
    paths.directory.mkdir(parents=True, exist_ok=True)
    story = Story(recordings.read(recordings.shipped()), directory.name, ranks, faults=False)
    scenes = [story.scene(number, 0.0) for number in range(1, story.length + 1)]
    part_rows = [[writes._rank_row(part, 0.0) for part in scene.parts] for scene in scenes]
    first = story.length * 2 // 3  # what is repeated is the last third
    began_at = time.time() - steps * STEP_SECONDS
    connection = open_for_writing(paths.record, RUN_SCHEMA)
    connection.execute("PRAGMA synchronous=OFF")
    for begin in range(1, steps + 1, PAGE):
        rows, parts = [], []
        for step in range(begin, min(begin + PAGE, steps + 1)):
            at = began_at + step * STEP_SECONDS
            which = step - 1 if step <= len(scenes) else first + (step - first) % (len(scenes) - first)
            scene = scenes[which]
            made = msgspec.structs.replace(
                scene.step, step=step, committed_at=at, cursor=step * scene.step.global_batch,
                tokens_total=step * scene.step.weight, loss=scene.step.loss * (1 + 0.2 * (1 - step / steps)),
            )  # fmt: skip
            rows.append(writes._step_row(made))
            parts += [(step, *row[1:-1], at) for row in part_rows[which]]
        connection.execute("BEGIN")
        connection.executemany(writes._insertion("steps", rows[0]), rows)
        connection.executemany(writes._insertion("rank_steps", parts[0]), parts)
        connection.execute("COMMIT")
        if begin % (10 * PAGE) == 1:
            sys.stderr.write(f"\rrecord: {begin:,} steps of {steps:,}")
    for begin in range(0, steps + 1, 10 * PAGE):  # whole buckets of every level at a time
        connection.execute("BEGIN")
        rebuild_rollups(connection, max(begin, 1), min(begin + 10 * PAGE - 1, steps))
        connection.execute("COMMIT")
        sys.stderr.write(f"\rrecord: rollups to step {begin:,}   ")
    sys.stderr.write("\n")
    connection.close()
    with RunRecorder(paths, resumable=False) as recorder:
        recorder.set_meta(WHOLE, str(steps))
        for event in story.recording.events[:20]:
            severity: Any = event.severity
            recorder.event(began_at, event.kind, severity, event.by, event.text, step=event.step or None)
    return directory
