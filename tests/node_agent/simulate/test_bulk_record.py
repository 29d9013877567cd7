"""A simulated run's record: the same rows and rollups as if each step had been written on its own."""

import sqlite3

import pytest
from tests.node_agent.support.scenarios import simulate

from trainctl.node_agent.simulate.bulk_record import BulkRecord
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import rebuild_rollups

NODES = {
    "a": {"samples_per_second": 8.0, "model_gb": 1.0, "memory_gb": 4.0},
    "b": {"samples_per_second": 4.0, "fails_at": [23]},
}
ROLLUPS = "SELECT * FROM rollups ORDER BY metric, rank, bucket_steps, bucket"


def test_rollups_made_in_bulk_are_those_made_step_by_step(tmp_path):
    simulation, _ = simulate(tmp_path, NODES, steps=137)
    with sqlite3.connect(simulation.paths.record) as connection:
        bulk = connection.execute(ROLLUPS).fetchall()
        rebuild_rollups(connection, 1, 137)
        single = connection.execute(ROLLUPS).fetchall()
    assert [row[:5] for row in bulk] == [row[:5] for row in single]
    for made, known in zip(bulk, single, strict=True):
        assert made[5:] == pytest.approx(known[5:], rel=1e-9, abs=1e-12)


def test_a_full_disk_ends_it_and_closes_the_record(tmp_path):
    record = BulkRecord(RunPaths(tmp_path))
    connection = record._writer._connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count={pages}")
    for number in range(2000):
        record.event(float(number), e.Notice("text " * 20), "info", "test")
    with pytest.raises(RefusedError, match="full: free some space, or give --output another folder"):
        record.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")
