"""Every report that the loop appends reaches rank-R.db, also while the disk refuses for a time."""

import math
import sqlite3
from pathlib import Path

import pytest
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import open_for_reading


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
