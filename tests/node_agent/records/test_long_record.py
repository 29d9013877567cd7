"""The benchmarks' long record, most of which is copied, is what the record's own functions would have made of it."""

import sqlite3
from pathlib import Path

import pytest
from benchmarks.lib import long_record

from trainctl.protocol.record.rollups import rebuild_rollups

STEPS, BLOCK = 5_345, 1_000


def test_copied_blocks_have_the_rollups_that_their_steps_make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_record, "BLOCK", BLOCK)
    connection = sqlite3.connect(long_record.make(tmp_path, STEPS, 1) / "record.db", isolation_level=None)
    for table in ("steps", "rank_steps"):
        found = connection.execute(f"SELECT min(step), max(step), count(DISTINCT step), count(*) FROM {table}")
        assert found.fetchone() == (1, STEPS, STEPS, STEPS)
    rollups = "SELECT * FROM rollups ORDER BY metric, rank, bucket_steps, bucket"
    copied = connection.execute(rollups).fetchall()
    connection.execute("BEGIN")
    connection.execute("DELETE FROM rollups")
    rebuild_rollups(connection, 1, STEPS)
    made = connection.execute(rollups).fetchall()
    connection.close()
    assert [row[:5] for row in copied] == [row[:5] for row in made]
    assert [value for row in copied for value in row[5:]] == pytest.approx([value for row in made for value in row[5:]])
