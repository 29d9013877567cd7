"""Tests of what a rank keeps and shows, and a whole run as it is read."""

import math
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.waiting import until

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import NoteWritten
from trainctl.protocol.record import status_page
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import open_for_reading
from trainctl.protocol.record.whole_run import CurvePoint, PlanSpan, WholeRunReader


def report(step: int) -> m.Report:
    return m.Report(
        run="r", rank=0, generation=m.Generation(1, 2), seq=step, kind="train", step=step, loss_sum=math.nan,
        weight=2.0, own_weight=1.0, own_samples=1, own_tokens=3, micro_batch=1,
        phases=m.Phases(0.1, 0.2, 0.3, 0.4, 0.5, 0.6), step_seconds=2.1, finished_at=9.0,
    )  # fmt: skip


def rows(path: Path) -> int:
    connection = open_for_reading(path)
    try:
        return int(connection.execute("SELECT count(*) FROM rank_steps").fetchone()[0])
    finally:
        connection.close()


def test_rapid_reports_all_arrive_as_they_were_made(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "rank-0.db", "here")
    for step in range(1, 20_001):
        writer.append(report(step))
    writer.close()
    assert rows(tmp_path / "rank-0.db") == 20_000
    connection = open_for_reading(tmp_path / "rank-0.db")
    connection.row_factory = sqlite3.Row
    row = dict(connection.execute("SELECT * FROM rank_steps WHERE step = 3").fetchone())
    connection.close()
    assert row == {
        "step": 3, "rank": 0, "term": 1, "n": 2, "node": "here", "tokens": 3.0, "samples": 1, "micro_batch": 1,
        "replays": 0, "step_seconds": 2.1, "data_seconds": 0.1, "forward_seconds": 0.2, "backward_seconds": 0.3,
        "sync_seconds": 0.4, "optimizer_seconds": 0.5, "wait_seconds": 0.6, "memory_bytes": None,
        "memory_peak_bytes": None, "memory_cap_bytes": None, "finished_at": 9.0, "weight": 1.0,
    }  # fmt: skip


def test_a_record_that_cannot_be_written_for_a_time_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another writer's lock stands for a full disk: SQLite refuses both with an error at BEGIN or COMMIT."""
    monkeypatch.setattr("trainctl.protocol.record.rank_record._RETRY_SECONDS", 0.05)
    path = tmp_path / "rank-0.db"
    writer = MetricsWriter(path, "here")
    writer._connection.execute("PRAGMA busy_timeout=0")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    writer.append(report(1))
    assert "database is locked" in until(lambda: writer._said)
    writer.append(report(2))
    with pytest.raises(OSError, match=r"rank-0\.db: recording of metrics is delayed: database is locked"):
        writer.sync()
    other.execute("ROLLBACK")
    other.close()
    writer.sync()
    assert rows(path) == 2
    writer.close()
    assert rows(path) == 2
    assert caplog.text.count("recording of metrics is delayed") == 1


def test_what_is_shown_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.status"
    assert status_page.read_status(path) is None
    for content in (b"", b"short", bytes(64), b"\x01" + bytes(63), b"\xff" * 64):  # torn, empty or odd
        path.write_bytes(content)
        assert status_page.read_status(path) is None
    path.unlink()
    writer = status_page.StatusWriter(path, os.getpid())
    first = status_page.read_status(path)
    assert first is not None
    assert first == status_page.Status(os.getpid(), 0, 0, 0, "starting", first.changed_at)
    writer.show("forward", step=7, generation=(1, 4))
    for phase in status_page.STATUS_PHASES:
        writer.show(phase)
        seen = status_page.read_status(path)
        assert seen is not None
        assert seen == status_page.Status(os.getpid(), 1, 4, 7, phase, seen.changed_at)
    writer.close()
    assert status_page.read_status(path) is not None


def test_no_reader_sees_half_an_update(tmp_path: Path) -> None:
    writer = status_page.StatusWriter(tmp_path / "page", 1)

    def write() -> None:
        for step in range(3000):
            writer.show("forward", step=step, generation=(step, step))

    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(write)
        while not writing.done():
            seen = status_page.read_status(tmp_path / "page")
            assert seen is None or seen.step == seen.term == seen.n
        writing.result()
    writer.close()


STEPS = 300


def commit(recorder: RunDb, step: int, n: int, syncs: tuple[float, ...], loss: float, version: int) -> None:
    generation = m.Generation(1, n)
    made = m.StepCommitted(
        run="run-1", generation=generation, step=step, committed_at=float(step), loss=loss, weight=8.0, samples=8,
        learning_rate=1e-3, grad_norm=1.0, cursor=8 * step, global_batch=8, plan_version=version, step_seconds=2.0,
        tokens_total=8.0 * step, tokens=8, weight_total=8.0 * step, seconds_total=2.0 * step,
    )  # fmt: skip
    parts = [
        m.RankStep(
            run="run-1", generation=generation, step=step, rank=rank, node=f"n{rank}", tokens=4.0, samples=4,
            micro_batch=4, replays=0, step_seconds=2.0, phases=m.Phases(0.0, 0.5, 0.5, sync, 0.25, 0.125),
        )
        for rank, sync in enumerate(syncs)
    ]  # fmt: skip
    recorder.commit(made, parts, float(step))


def test_sums_leave_out_retracted_steps_and_waits_are_apart(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    with RunDb(paths, resumable=False) as recorder:
        for step in range(1, STEPS + 1):
            commit(recorder, step, 1, (0.25, 0.75), 2.0, 1 + (step > 200))
        commit(recorder, STEPS, 2, (0.5,), math.nan, 3)  # made again by one rank
        for number in range(700):
            recorder.event(1.0, NoteWritten(str(number)), "info", "anna")
    with WholeRunReader(paths) as reader:
        first, second = reader.rank_totals()
        assert (first.node, first.steps, first.samples, first.seconds) == ("n0", STEPS, 4 * STEPS, 2.0 * STEPS)
        assert (first.phases.sync, first.phases.wait) == (0.25 * (STEPS - 1) + 0.5, 0.125 * STEPS)
        assert (second.steps, second.phases.sync) == (STEPS - 1, 0.25 * (STEPS - 1))
        assert second.phases.wait == 0.625 * (STEPS - 1)
        assert reader.plan_spans() == (PlanSpan(1, 1, 200), PlanSpan(2, 201, STEPS - 1), PlanSpan(3, STEPS, STEPS))
        *curve, last = reader.curve()
        assert curve == [CurvePoint(step, 2.0, 8 * step) for step in range(1, STEPS)]
        assert last.loss is not None and math.isnan(last.loss)
        assert [(made.step, made.seconds) for made in reader.commits() if made.retracted] == [(STEPS, 2.0)]
        events = reader.all_events()
        assert [event.text for event in events] == [str(number) for number in range(700)]
        assert reader.all_events(events[-2].id) == events[-1:]
