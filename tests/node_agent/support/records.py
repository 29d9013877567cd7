"""Parts from which tests make a run's record, and what its rollups should be by its rows alone."""

import math
import sqlite3
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.memory_values import memory

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.checkpoints import CheckpointMetadata, Environment, Lineage, Performance
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import RUN_RANK, unpack
from trainctl.protocol.record.schema import ROLLUP_LEVELS

PHASE_METRICS = ("data_seconds", "forward_seconds", "backward_seconds", "sync_seconds", "optimizer_seconds")
FIRST = m.Generation(1, 1)


def step(number: int, generation: m.Generation = FIRST, loss: float = 2.5, seconds: float = 0.5) -> m.StepCommitted:
    return m.StepCommitted(
        run="run-1", generation=generation, step=number, committed_at=1000.0 + number, loss=loss, weight=3072.0,
        samples=24, learning_rate=1e-3, grad_norm=0.5, cursor=24 * number, global_batch=24, plan_version=1,
        step_seconds=seconds, tokens=4096, tokens_total=4096.0 * number, weight_total=3072.0 * number,
        seconds_total=seconds * number, values={"clip_scale": 1 / (1 + number % 3)},
    )  # fmt: skip


def part(number: int, rank: int = 0, generation: m.Generation = FIRST, tokens: float = 100.0) -> m.RankStep:
    return m.RankStep(
        run="run-1", generation=generation, step=number, rank=rank, node=f"node-{rank}", tokens=tokens, samples=24,
        micro_batch=8, replays=0, step_seconds=0.25, phases=m.Phases(0.25, 0.25, 0.5, 0.0, 0.125, 0.0625), weight=75.0,
        values={**memory(10**9, 2 * 10**9), "own_loss": 2.0 + 0.001 * number, "user:tries": float(number % 7)},
    )  # fmt: skip


def drop(recorder: RunDb) -> None:
    """Let a record go as a killed agent does: what waits is lost."""
    writer = recorder._writer
    with writer._changed:
        writer._waiting.clear()
        writer._settled = writer._given
    writer.close()


def report(rank: int = 0, step: int = 1, **fields: Any) -> m.Report:
    """A rank's report of a train plan; `fields`: those that are other than usual, or more."""
    made = m.Report(
        run="sim", rank=rank, generation=FIRST, seq=1, kind="train", step=step, loss_sum=1.0, weight=1.0,
        own_weight=1.0, own_samples=6,
    )  # fmt: skip
    return msgspec.structs.replace(made, **fields)


def write_checkpoint(paths: RunPaths, step: int, generation: m.Generation | None = None, state: str = "{}") -> Path:
    """Write a complete checkpoint of this node's; `state`: the content of its only file."""
    folder = paths.checkpoint(step)
    folder.mkdir(parents=True)
    (folder / "state.json").write_text(state)
    metadata = CheckpointMetadata(
        recipe={}, performance=Performance(), lineage=Lineage(run=paths.directory.name, generation=generation),
        environment=Environment(node="a", program="", python="", library="", device="cpu", system=""),
    )  # fmt: skip
    entry = checkpoints.FileEntry(len(state), checkpoints.digest_of(folder / "state.json"))
    manifest = checkpoints.Manifest(
        run=paths.directory.name, step=step, written_at=0.0, files={"state.json": entry}, metadata=metadata
    )
    (folder / checkpoints.MANIFEST_NAME).write_bytes(msgspec.json.encode(manifest))
    return folder


def plan(number: int, generation: m.Generation = FIRST, commands: tuple[str, ...] = ()) -> m.StepPlan:
    return m.StepPlan(
        run="run-1", generation=generation, seq=number, kind="train", step=number, plan_version=1, cursor=24 * number,
        global_batch=24, work=(m.RankWork(0, (m.Range(24 * number, 24),), 8),), learning_rate=1e-3, divisor=4096.0,
        commands=commands,
    )  # fmt: skip


def reading(at: float) -> m.HostReading:
    return m.HostReading(
        node="a", read_at=at, cpu_percent=12.5, memory_used_bytes=1, memory_total_bytes=2, disk_free_bytes=None
    )


def rows(paths: RunPaths, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(paths.record)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def rollups(paths: RunPaths) -> dict[tuple[object, ...], tuple[object, ...]]:
    found = rows(paths, "SELECT metric, rank, bucket_steps, bucket, count, minimum, maximum, mean, last FROM rollups")
    return {row[:4]: row[4:] for row in found}


def expected_rollups(paths: RunPaths) -> dict[tuple[object, ...], tuple[object, ...]]:
    """Return the rollups from the rows alone, the slow and plain way."""
    values: dict[tuple[object, ...], list[float]] = {}
    of_run = rows(
        paths,
        "SELECT step, loss, grad_norm, learning_rate, step_seconds, tokens, weight, samples FROM steps"
        " WHERE NOT retracted ORDER BY step",
    )
    of_ranks = rows(
        paths,
        "SELECT r.step, r.rank, r.step_seconds, r.data_seconds + r.forward_seconds + r.backward_seconds, r.tokens,"
        " r.wait_seconds, r.memory_bytes, r.memory_peak_bytes, r.memory_cap_bytes, r.data_seconds, r.forward_seconds,"
        " r.backward_seconds,"
        " r.sync_seconds, r.optimizer_seconds FROM rank_steps r JOIN steps s USING (step, term, n)"
        " WHERE NOT s.retracted ORDER BY r.step",
    )
    newest = max((number for number, *_ in of_run), default=0)
    for number, loss, norm, rate, seconds, tokens, weight, samples in of_run:
        sizes = {"tokens": tokens, "weight": weight, "samples": samples, "steps": 1}
        rates = {
            f"{name}_per_second": size / seconds if size is not None and seconds > 0 else None
            for name, size in sizes.items()
        }
        named = {"loss": loss, "grad_norm": norm, "learning_rate": rate, "step_seconds": seconds}
        for name in ("loss", "grad_norm"):
            value = named[name]
            unsaid = isinstance(value, str)
            named[name] = None if unsaid else value
            named[f"{name}_not_finite"] = None if unsaid or (value is not None and math.isfinite(value)) else 1.0
        of_sample = {"seconds_per_sample": seconds / samples if samples else None}
        _collect(values, number, RUN_RANK, {**named, **rates, **of_sample}, newest)
    for number, rank, seconds, busy, tokens, wait, held, peak, cap, *phases in of_ranks:
        named = {"rank_step_seconds": seconds, "busy_seconds": busy, "wait_seconds": wait, "memory_bytes": held}
        named |= {"memory_peak_bytes": peak, "memory_cap_bytes": cap}
        named |= dict(zip(PHASE_METRICS, phases, strict=True))
        own_rate = tokens / busy if tokens and busy > 0 else None
        _collect(values, number, rank, {**named, "own_tokens_per_second": own_rate}, newest)
    names = dict(rows(paths, "SELECT id, name FROM metric_names"))
    for number, rank, *packed in rows(paths, "SELECT step, rank, present, body FROM metric_values ORDER BY step"):
        for name, value in unpack(*packed).items():
            _collect(values, number, rank, {names[name]: value}, newest)
    return {
        key: (len(found), min(found), max(found), sum(found) / len(found), found[-1]) for key, found in values.items()
    }


def check_rollups(paths: RunPaths) -> None:
    """All that the rows make is there, and nothing else but what nobody reads: a bucket of a metric by name that has
    the newest step again, since those after it were retracted, and whose values are gone."""
    wanted = expected_rollups(paths)
    newest = rows(paths, "SELECT coalesce(max(step), 0) FROM steps WHERE NOT retracted")[0][0]
    made = {key: row for key, row in rollups(paths).items() if key[3] < newest // key[2]}  # type: ignore[operator]
    assert made.keys() == wanted.keys()
    for key, row in wanted.items():
        scale = max(abs(row[1]), abs(row[2]))  # type: ignore[arg-type]
        least = sys.float_info.min  # what is smaller has fewer digits
        assert made[key] == pytest.approx(row, rel=1e-9, abs=1e-9 * scale + least), key


def _collect(
    values: dict[tuple[object, ...], list[float]],
    step: int,
    rank: int,
    named: dict[str, float | None],
    newest: int,
) -> None:
    """Only what is in buckets before that of `newest`."""
    for metric, value in named.items():
        for level in ROLLUP_LEVELS:
            whole = step // level < newest // level
            if value is not None and math.isfinite(value) and whole:
                values.setdefault((metric, rank, level, step // level), []).append(value)
