"""Metrics by name in a run's record: at every zoom what their values make, of the steps that stand, for so long."""

import statistics
from pathlib import Path

import msgspec
import pytest
from tests.node_agent.support.records import check_rollups, part, rows, step

from trainctl.node_agent.records import statements
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import reader as reading
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

NAME = "user:reward"


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run-1").mkdir()
    return RunPaths(tmp_path / "run-1")


def value_at(number: int, n: int = 1) -> float:
    return float((number * 7919) % 101) + 1000.0 * (n - 1)


def commit(recorder: RunDb, number: int, n: int = 1) -> None:
    generation = m.Generation(1, n)
    own = msgspec.structs.replace(part(number, generation=generation), values={NAME: value_at(number, n)})
    recorder.commit(step(number, generation), [own], 0.0)


@pytest.mark.parametrize("columns", [7, 24, 60, 240])
def test_a_chart_has_what_the_values_of_its_buckets_make(paths: RunPaths, columns: int) -> None:
    with RunDb(paths) as recorder:
        for number in range(1, 241):
            commit(recorder, number)
    with RecordReader(paths) as reader:
        series = reader.series(NAME, 0, 1, 240, columns)
        size = series.bucket_steps
        assert 240 / columns <= size and len(series.steps) <= columns
        for start, low, high, mean, last in zip(
            series.steps, series.minimum, series.maximum, series.mean, series.last, strict=True
        ):
            values = [value_at(number) for number in range(max(start, 1), min(start + size, 241))]
            assert (low, high, last) == (min(values), max(values), values[-1])
            assert mean == pytest.approx(statistics.fmean(values))
        assert reader.own_metrics() == (NAME,)
        with pytest.raises(InvalidInputError, match="unknown metric 'user:other'"):
            reader.series("user:other", 0)


def test_only_the_redo_of_a_step_is_seen(paths: RunPaths) -> None:
    with RunDb(paths) as recorder:
        for number in range(1, 31):
            commit(recorder, number)
        recorder.retract_after(15)
        for number in range(16, 26):
            commit(recorder, number, n=2)
    check_rollups(paths)
    with RecordReader(paths) as reader:
        assert reader.series(NAME, 0).last == tuple(value_at(number, 1 + (number > 15)) for number in range(1, 26))


def test_old_values_go_and_their_rollups_stay(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (statements, reading):
        monkeypatch.setattr(module, "VALUES_KEPT", 50)
    with RunDb(paths) as recorder:
        for number in range(1, 201):
            commit(recorder, number)
    assert rows(paths, "SELECT count(*), min(step) FROM metric_values WHERE rank = 0") == [(50, 151)]
    with RecordReader(paths) as reader:
        old = reader.series(NAME, 0, 20, 139, 120)
        assert (old.bucket_steps, old.steps) == (10, tuple(range(20, 140, 10)))
        assert old.maximum[0] == max(value_at(number) for number in range(20, 30))
        assert reader.series(NAME, 0, 151, 200, 120).bucket_steps == 1
