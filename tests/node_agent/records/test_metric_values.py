"""Metrics by name in a run's record: at every zoom what their values make, of the steps that stand, for so long."""

import statistics
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.support.records import check_rollups, part, rows, step

from trainctl.node_agent.records import run_db, statements
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.downsampling import spans
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import pack, unpack, values_of
from trainctl.protocol.record.schema import ROLLUP_LEVELS

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


STEPS = 2_345


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordReader]:
    """It ends within a bucket of every size."""
    paths = RunPaths(tmp_path_factory.mktemp("run-1"))
    with RunDb(paths) as recorder:
        for number in range(1, STEPS + 1):
            commit(recorder, number)
    with RecordReader(paths) as reader:
        yield reader


@pytest.mark.parametrize("columns", [2, 60])
@pytest.mark.parametrize(("first", "last"), [(1, STEPS), (1_005, 2_341), (7, 7)])
def test_a_chart_has_what_the_values_of_its_buckets_make(long_run, first, last, columns):
    series = long_run.series(NAME, 0, first, last, columns)
    size = series.bucket_steps
    assert (last - first + 1) / columns <= size and len(series.steps) <= columns
    assert series.steps == tuple(range(first // size * size, last + 1, size))
    for start, low, high, mean, newest in zip(
        series.steps, series.minimum, series.maximum, series.mean, series.last, strict=True
    ):
        values = [value_at(number) for number in range(max(start, first), min(start + size, last + 1))]
        assert (low, high, newest) == (min(values), max(values), values[-1])
        assert mean == pytest.approx(statistics.fmean(values))


def test_a_metric_that_nobody_has_is_refused(long_run: RecordReader) -> None:
    assert long_run.own_metrics() == (NAME,)
    with pytest.raises(InvalidInputError, match="unknown metric 'user:other'"):
        long_run.series("user:other", 0)


@given(st.dictionaries(st.integers(1, 200), st.floats(), max_size=80))
def test_what_is_packed_comes_back(values: dict[int, float]) -> None:
    packed = pack(values)
    assert repr(unpack(*packed)) == repr(dict(sorted(values.items())))
    for number in range(202):
        found = [(7, values[number])] if number in values else []
        assert repr(list(values_of(number, [(7, *packed), (8, b"", b"")]))) == repr(found)


@given(st.integers(0, 5_000), st.integers(0, 5_000), st.sampled_from([0, *ROLLUP_LEVELS]), st.integers(0, 6_000))
def test_a_chart_reads_each_step_once_and_no_bucket_before_it_is_whole(first, length, level, newest):
    made = spans(first, first + length, level, newest)
    assert [step for span in made for step in range(span.first, span.last + 1)] == [*range(first, first + length + 1)]
    for span in made:
        if span.level:
            assert span.level <= level and span.first % span.level == 0 == (span.last + 1) % span.level
            assert span.last < newest
        elif newest > first + length:
            assert span.last - span.first < 2 * ROLLUP_LEVELS[0] or not level


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
    monkeypatch.setattr(statements, "VALUES_KEPT", 50)
    monkeypatch.setattr(run_db, "FORGET_EVERY_STEPS", 1)
    with RunDb(paths) as recorder:
        for number in range(1, 201):
            commit(recorder, number)
    assert rows(paths, "SELECT count(*), min(step) FROM metric_values WHERE rank = 0") == [(51, 150)]
    with RecordReader(paths) as reader:
        old = reader.series(NAME, 0, 20, 139, 120)
        assert (old.bucket_steps, old.steps) == (10, tuple(range(20, 140, 10)))
        assert old.maximum[0] == max(value_at(number) for number in range(20, 30))
        assert reader.series(NAME, 0, 151, 200, 120).bucket_steps == 1


@pytest.mark.parametrize("apart", [7, 2_048])
def test_steps_whose_numbers_are_far_apart_are_all_in_the_chart(paths: RunPaths, apart: int) -> None:
    """As of a loop whose step is the number of its environment's steps."""
    numbers = [number * apart for number in range(1, 60)]
    with RunDb(paths) as recorder:
        for number in numbers:
            commit(recorder, number)
    check_rollups(paths)
    with RecordReader(paths) as reader:
        series = reader.series(NAME, 0, columns=2_000)
        assert len(series.steps) == len(reader.series("loss", columns=2_000).steps) == len(numbers)
        assert series.last == tuple(map(value_at, numbers))
        few = reader.series(NAME, 0, columns=5)
        assert (max(few.maximum), few.last[-1]) == (max(map(value_at, numbers)), value_at(numbers[-1]))
