"""A run directory with a record of very many steps, made from a simulated run.

Its first block of steps is written by the record's own writers. Each later block has the same steps further on, copied
by SQL, which takes a hundredth of the time; only the loss falls a little from block to block.
"""

import shutil
import sqlite3
import sys
import time
from pathlib import Path

import msgspec

from trainctl.node_agent.records import statements as writes
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.simulate import scenario
from trainctl.node_agent.simulate.simulation import Simulation
from trainctl.protocol.messages import RankStep, RankView, RunView, StepCommitted
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import rebuild_rollups
from trainctl.protocol.record.schema import ROLLUP_LEVELS, RUN_SCHEMA, open_for_writing

STEP_SECONDS = 0.5
BLOCK = 2 * ROLLUP_LEVELS[-1]
"""Steps of a block: whole buckets of every level, so that a bucket of one block is that of another."""
WHOLE = "long-record"
"""The key that says that a record was made to its end."""
SIMULATED_STEPS = 300
RUN = """
run = {{ name = "long", steps = {steps} }}
model = {{ path = "/model" }}
data = {{ path = "/data.txt" }}
batch = {{ global = {batch}, micro = 4 }}
optimizer = {{ learning_rate = 1e-3 }}
checkpoint = {{ at_end = false }}
"""
NODE = """
[nodes.n{rank}.simulated]
samples_per_second = 16
link_gbit = 10
model_gb = 10
sample_gb = 1
memory_gb = 40
"""
Step = tuple[StepCommitted, tuple[RankStep, ...]]


def make(folder: Path, steps: int, ranks: int) -> Path:
    """The run directory in `folder`, made unless it is there already."""
    directory = folder / f"long-{steps}x{ranks}"
    paths = RunPaths(directory)
    if paths.record.is_file():
        with RecordReader(paths) as reader:
            if reader.meta(WHOLE) == str(steps):
                return directory
        shutil.rmtree(directory)
    paths.directory.mkdir(parents=True, exist_ok=True)
    simulated = simulated_steps(folder / f"simulated-{ranks}", ranks)
    began_at = time.time() - steps * STEP_SECONDS
    connection = open_for_writing(paths.record, RUN_SCHEMA)
    for setting in ("synchronous=OFF", "journal_mode=OFF", "cache_size=-400000"):
        connection.execute(f"PRAGMA {setting}")
    fill(connection, simulated, steps, began_at)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.close()
    with RunDb(paths, resumable=False) as recorder:
        recorder.set_meta(WHOLE, str(steps))
        recorder.set_meta("view", msgspec.json.encode(_view(paths, steps)).decode(), own=True)
    return directory


def _view(paths: RunPaths, steps: int) -> RunView:
    with RecordReader(paths) as reader:
        last = reader.last_step()
        assert last is not None
        parts = reader.rank_steps(last.step)
    ranks = tuple(
        RankView(part.rank, part.node, "done", last.committed_at, share=part.samples, micro_batch=part.micro_batch)
        for part in parts
    )
    return RunView(
        run=paths.directory.name,
        name="long",
        state="finished",
        lead=parts[0].node,
        engine="gloo",
        generation=last.generation,
        step=steps,
        steps=steps,
        plan_version=1,
        global_batch=last.global_batch,
        samples=86_282,
        cursor=last.cursor,
        learning_rate=1e-3,
        ranks=ranks,
        directory=str(paths.directory),
        started_at=last.committed_at - steps * STEP_SECONDS,
    )


def simulated_steps(folder: Path, ranks: int) -> list[Step]:
    """The steps of a short simulated run with their ranks' parts."""
    folder.mkdir(parents=True, exist_ok=True)
    cluster, run = folder / "cluster.toml", folder / "run.toml"
    cluster.write_text("".join(NODE.format(rank=rank) for rank in range(ranks)))
    run.write_text(RUN.format(steps=SIMULATED_STEPS, batch=4 * ranks))
    found = scenario.read(cluster, run, seed=0, steps=None, parameters=1_000_000)
    simulation = Simulation(found, folder / "run")
    simulation.play()
    with RecordReader(simulation.paths) as reader:
        steps = [(step, tuple(reader.rank_steps(step.step))) for step in reader.steps(0, SIMULATED_STEPS)[0]]
    shutil.rmtree(folder)
    return steps


def fill(connection: sqlite3.Connection, simulated: list[Step], steps: int, began_at: float) -> None:
    """Steps 1 to `steps` with their ranks and rollups. The first two blocks, the beginning and what is repeated after
    it, are written; what is there is doubled until it is all, and the buckets at its end are made again."""
    done = min(2 * BLOCK - 1, steps)
    _write(connection, simulated, done, steps, began_at)
    while done < steps:
        shift = done + 1 - BLOCK
        copied = min(done + shift, steps)
        _copy(connection, {"first": BLOCK, "last": copied - shift, "shift": shift, "steps": steps})
        done = copied
        sys.stderr.write(f"\rrecord: {done:,} steps of {steps:,}   ")
    sys.stderr.write("\n")
    connection.execute("BEGIN")
    rebuild_rollups(connection, done // BLOCK * BLOCK or 1, done)
    connection.execute("COMMIT")


def _write(connection: sqlite3.Connection, simulated: list[Step], done: int, steps: int, began_at: float) -> None:
    first = len(simulated) * 2 // 3  # what is repeated is the last third
    connection.execute("BEGIN")
    for step in range(1, done + 1):
        committed, parts = simulated[step - 1 if step <= len(simulated) else first + step % (len(simulated) - first)]
        at = began_at + step * STEP_SECONDS
        loss = committed.loss * (1.2 - 0.2 * (step // BLOCK * BLOCK) / steps)
        made = msgspec.structs.replace(
            committed,
            step=step,
            committed_at=at,
            cursor=step * committed.global_batch,
            tokens_total=step * committed.weight,
            weight_total=step * committed.weight,
            seconds_total=step * committed.step_seconds,
            loss=loss,
        )
        row = writes._step_row(made)
        connection.execute(writes._insertion("steps", row), row)
        for part in parts:
            row = writes._rank_row(msgspec.structs.replace(part, step=step), at)
            connection.execute(writes._insertion("rank_steps", row), row)
    rebuild_rollups(connection, 1, done)
    connection.execute("COMMIT")


def _copy(connection: sqlite3.Connection, span: dict[str, int]) -> None:
    """The steps from `first` to `last` once more, `shift` steps on, with the buckets that are whole."""
    later = f"{{}} + :shift * {STEP_SECONDS}"
    fallen = f"CASE metric WHEN 'loss' THEN {_fall('bucket * bucket_steps')} ELSE 1.0 END"
    buckets = {"bucket": "bucket + :shift / bucket_steps"}
    buckets |= {name: f"{name} * {fallen}" for name in ("minimum", "maximum", "mean", "last")}
    step = {
        "step": "step + :shift",
        "committed_at": later.format("committed_at"),
        "loss": f"loss * {_fall('step')}",
        "cursor": "cursor + :shift * global_batch",
        "tokens_total": "tokens_total + :shift * tokens",
        "weight_total": "weight_total + :shift * weight",
        "seconds_total": "seconds_total + :shift * step_seconds",
    }
    within = "WHERE step BETWEEN :first AND :last"
    connection.execute("BEGIN")
    _again(connection, "steps", step, within, span)
    _again(connection, "rank_steps", {"step": step["step"], "finished_at": later.format("finished_at")}, within, span)
    whole = "WHERE bucket * bucket_steps >= :first AND (bucket + 1) * bucket_steps - 1 <= :last"
    _again(connection, "rollups", buckets, whole, span)
    connection.execute("COMMIT")


def _fall(step: str) -> str:
    """Return the SQL factor of a step's loss where the step is copied: over the record it falls by a sixth."""
    part = f"(1.2 - 0.2 * (({{}}) / {BLOCK}) * {BLOCK} / :steps)"
    return f"{part.format(f'{step} + :shift')} / {part.format(step)}"


def _again(
    connection: sqlite3.Connection, table: str, changed: dict[str, str], which: str, span: dict[str, int]
) -> None:
    """Inserts rows of a table once more, with some of their columns changed."""
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    columns = ", ".join(changed.get(name, name) for name in names)
    connection.execute(f"INSERT INTO {table} SELECT {columns} FROM {table} {which}", span)
