"""The reader: any zoom of a long run is exact and cheap, and every message comes back as it was written."""

import contextlib
import itertools
import math
import sqlite3
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory_values import memory

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.record.downsampling import RAW_STEPS_PER_COLUMN, choose, pieces
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader, Totals
from trainctl.protocol.record.schema import ROLLUP_LEVELS, RUN_SCHEMA, open_for_writing

LONG = 200_000
SPIKE_AT, SPIKE = 123_457, 99.0
HOLE = range(150_000, 160_000)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordReader]:
    """Steps of two ranks, written by SQL alone: one loss in seven is NULL, with a spike and a hole."""
    paths = RunPaths(tmp_path_factory.mktemp("long"))
    connection = open_for_writing(paths.record, RUN_SCHEMA)
    connection.execute("PRAGMA synchronous=OFF")
    connection.executescript(f"""
        BEGIN;
        WITH RECURSIVE numbers(k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM numbers WHERE k < {LONG})
        INSERT INTO steps SELECT k, 1, 1, k, CASE WHEN k = {SPIKE_AT} THEN {SPIKE} WHEN k % 7 = 3 THEN NULL
          ELSE (k * 7919 % 1000) / 100.0 END, 3072, 24, 0.001, 1.0, 24 * k, 24, 1, 0.25 + k % 5, 3072.0 * k, NULL, 0,
          3072, 3072.0 * k, 1.0 * k FROM numbers WHERE k NOT BETWEEN {HOLE.start} AND {HOLE.stop - 1};
        INSERT INTO rank_steps SELECT step, column1, 1, 1, 'node-' || column1, 100 + step % 3, 12, 4, 0, 0.5, 0.25,
          0.25, 0.5, 0, 0, step % 11, 1000 + step % 13, NULL, NULL, 0, 90 FROM steps CROSS JOIN (VALUES (0), (3));
    """)
    for level in ROLLUP_LEVELS:
        for metric, rank, source in (
            ("loss", -1, "SELECT step, loss AS v FROM steps"),
            ("tokens_per_second", -1, "SELECT step, weight / step_seconds AS v FROM steps"),
            ("wait_seconds", 3, "SELECT step, wait_seconds AS v FROM rank_steps WHERE rank = 3"),
            ("rank_step_seconds", 0, "SELECT step, step_seconds AS v FROM rank_steps WHERE rank = 0"),
            ("rank_step_seconds", 3, "SELECT step, step_seconds AS v FROM rank_steps WHERE rank = 3"),
        ):
            connection.execute(f"""
                WITH source AS MATERIALIZED ({source}), buckets AS (
                  SELECT step / {level} AS bucket, count(v) AS count, min(v) AS low, max(v) AS high, avg(v) AS mean,
                    max(step) AS newest FROM source WHERE v IS NOT NULL GROUP BY 1)
                INSERT INTO rollups SELECT '{metric}', {rank}, {level}, bucket, count, low, high, mean, v
                FROM buckets JOIN source ON step = newest""")
    connection.execute("COMMIT")
    connection.close()
    with RecordReader(paths) as reader:
        yield reader


@pytest.mark.parametrize(
    ("metric", "rank", "source"),
    [
        ("loss", None, "loss FROM steps WHERE loss IS NOT NULL"),
        ("tokens_per_second", None, "weight / step_seconds FROM steps"),
        ("wait_seconds", 3, "wait_seconds FROM rank_steps WHERE rank = 3"),
    ],
)
def test_every_zoom_of_a_long_run_is_what_its_steps_make(
    long_run: RecordReader, metric: str, rank: int | None, source: str
) -> None:
    with contextlib.closing(sqlite3.connect(long_run.path)) as connection:
        whole = connection.execute(f"SELECT step, {source} ORDER BY step").fetchall()
    for first, last, columns in (
        (0, None, 120), (1, LONG, 1), (1, LONG, 2), (123_000, 124_000, 120), (123_450, 123_460, 120), (99, 20_101, 80),
        (100_001, 199_999, 119), (149_000, 161_000, 100), (150_100, 150_200, 50), (LONG, LONG, 3), (7, 7, 1),
        (123_400, 123_457, 1), (0, LONG, 2000), (5, 2 * LONG, 33),
    ):  # fmt: skip
        series = long_run.series(metric, rank, first, last, columns)
        assert (series.metric, series.rank) == (metric, rank)
        buckets: dict[int, list[float]] = {}
        for step, value in whole:
            if first <= step <= (last or LONG):
                buckets.setdefault(step // series.bucket_steps * series.bucket_steps, []).append(value)
        assert series.steps == tuple(sorted(buckets))
        assert len(series.steps) <= columns
        assert series.minimum == tuple(map(min, buckets.values()))
        assert series.maximum == tuple(map(max, buckets.values()))
        assert series.last == tuple(values[-1] for values in buckets.values())
        assert series.mean == pytest.approx([sum(values) / len(values) for values in buckets.values()], rel=1e-9)


def test_a_single_spike_is_in_the_maximum_of_its_column_at_any_zoom(long_run: RecordReader) -> None:
    for columns in (1, 10, 120, 2000):
        series = long_run.series("loss", columns=columns)
        column = series.maximum.index(SPIKE)
        assert series.steps[column] <= SPIKE_AT < series.steps[column] + series.bucket_steps
        assert series.maximum.count(SPIKE) == 1
    beside = long_run.series("loss", None, SPIKE_AT + 1, LONG, 120)
    assert SPIKE not in beside.maximum
    assert SPIKE not in long_run.series("loss", None, 1, SPIKE_AT - 1, 120).maximum
    # A whole run fills most columns and leaves the hole open.
    series = long_run.series("loss", columns=120)
    assert series.bucket_steps == 1700 and len(series.steps) > 100
    assert not [step for step in series.steps if step in HOLE and step + series.bucket_steps <= HOLE.stop]
    assert long_run.ranks() == (0, 3)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 10**8), st.integers(1, 2000))
def test_a_zoom_covers_its_span_once_and_reads_few_rows(first: int, length: int, columns: int) -> None:
    last = first + length
    zoom = choose(first, last, columns)
    assert last // zoom.bucket_steps - first // zoom.bucket_steps < columns
    if columns > 1:  # one column may have to reach back to a multiple of its size
        assert zoom.bucket_steps <= 1.34 * math.ceil((length + 1) / (columns - 1))
    cut = pieces(first, last, zoom.level, oldest=0, newest=10**10)
    head, tail = range(cut.head_first, cut.head_last + 1), range(cut.tail_first, cut.tail_last + 1)
    if zoom.level == 0:
        assert len(head) == length + 1 <= RAW_STEPS_PER_COLUMN * columns
        return
    assert zoom.bucket_steps % zoom.level == 0
    middle = range(cut.bucket_first * zoom.level, (cut.bucket_last + 1) * zoom.level)
    spans = [span for span in (head, middle, tail) if len(span)]
    assert spans[0].start == first and spans[-1].stop == last + 1
    assert all(before.stop == after.start for before, after in itertools.pairwise(spans))
    assert len(head) < zoom.level * 2 and len(tail) < zoom.level
    if zoom.level < ROLLUP_LEVELS[-1]:
        assert len(middle) // zoom.level <= 40 * columns


@pytest.fixture
def small(tmp_path: Path) -> RunPaths:
    """Four steps: 3 was retracted and done again, 2 has no finite loss; three events; four evaluations, one undone."""
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    connection = open_for_writing(paths.record, RUN_SCHEMA)
    row, sums = "3072.0, 24, 0.001, 0.5, 0, 24, 1, 0.5, 9.0", "0, 4096, 8.0, 2.5"
    connection.executescript(f"""
        INSERT INTO steps VALUES (1, 1, 1, 1001.0, 5.0, {row}, NULL, {sums}),
          (2, 1, 1, 1002.0, NULL, {row}, 'nan', {sums}),
          (3, 1, 1, 1003.0, 77.0, {row}, NULL, 1, 4096, NULL, NULL), (3, 1, 2, 1004.0, 3.0, {row}, NULL, {sums}),
          (4, 1, 2, 1005.0, 9e999, {row}, NULL, {sums});
        INSERT INTO rank_steps VALUES
          (3, 0, 1, 1, 'a', 8.0, 4, 2, 0, 1.0, 1.0, 1.0, 2.0, 0.0, 0.0, 0.0, NULL, NULL, NULL, 0.0, 6.0),
          (3, 0, 1, 2, 'a', 8.0, 4, 2, 1, 1.5, 0.5, 1.0, 2.5, 0.1, 0.2, 0.3, 7, 8, 9, 0.0, 6.0);
        INSERT INTO events VALUES
          (1, 1000.0, 'run', 'good', 'auto', 'began', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
           NULL),
          (2, 1001.0, 'command', 'good', 'anna', 'micro 8 to 4', 2, 1, 1, 'id', 'resize-batch', '8', '4', 'applied',
           NULL, NULL),
          (3, 1002.0, 'run', 'info', 'auto', 'ended', 4, 1, 2, NULL, NULL, NULL, NULL, NULL, NULL,
           NULL);
        INSERT INTO evaluations VALUES (0, 999.0, 6.0, 10.0, 0.1), (2, 1003.0, 4.5, 10.0, 0.1),
          (2, 1002.0, 4.0, 10.0, 0.1), (3, 1003.5, 9.0, 10.0, 0.1);
        INSERT INTO evaluation_values VALUES ('eval/kl', 2, 1003.0, 0.5), ('eval/kl', 3, 1003.5, 0.75);
        INSERT INTO meta VALUES ('name', 'demo');
    """)
    connection.close()
    return paths


def test_steps_come_back_as_they_were_committed(small: RunPaths) -> None:
    with RecordReader(small.directory) as reader:
        steps, more = reader.steps(after=0, limit=3)
        assert [step.step for step in steps] == [1, 2, 3] and more
        assert math.isnan(steps[1].loss) and steps[1].skipped == "nan"
        assert steps[2] == m.StepCommitted(
            run="run-1", generation=m.Generation(1, 2), step=3, committed_at=1004.0, loss=3.0, weight=3072.0,
            samples=24, learning_rate=0.001, grad_norm=0.5, cursor=0, global_batch=24, plan_version=1, step_seconds=0.5,
            tokens_total=9.0, tokens=4096, weight_total=8.0, seconds_total=2.5,
        )  # fmt: skip
        assert [step.step for step in reader.steps(after=3)[0]] == [4] and not reader.steps(after=3)[1]
        last = reader.last_step()
        assert last is not None and last.step == 4 and last.loss == math.inf
        assert reader.meta("name") == "demo" and reader.meta("absent") is None


def test_only_the_redo_of_a_retracted_step_is_seen(small: RunPaths) -> None:
    with RecordReader(small) as reader:
        assert reader.totals() == Totals(4, 4 * 3072.0, 4 * 4096.0, 4 * 0.5, {"a": 8.0})
        assert reader.rank_steps(3) == (
            m.RankStep(
                run="run-1", generation=m.Generation(1, 2), step=3, rank=0, node="a", tokens=8.0, samples=4,
                micro_batch=2, replays=1, step_seconds=1.5, phases=m.Phases(0.5, 1.0, 2.5, 0.1, 0.2, 0.3),
                weight=6.0, values=memory(7, 8, 9),
            ),
        )  # fmt: skip
        assert reader.rank_steps(99) == ()
        series = reader.series("own_tokens_per_second", 0)
        assert series.steps == (3,) and series.last == (reader.rank_steps(3)[0].own_tokens_per_second,)
        assert reader.series("loss").steps == (1, 3) and reader.series("loss").maximum == (5.0, 3.0)
        assert reader.series("memory_bytes", 0).mean == (7.0,)
        assert reader.series("memory_bytes", 5).steps == ()


def test_events_are_paged_from_either_end_and_the_newest_evaluation_of_a_step_counts(small: RunPaths) -> None:
    with RecordReader(small) as reader:
        assert [event.id for event in reader.events(limit=2)[0]] == [1, 2] and reader.events(limit=2)[1]
        assert [event.id for event in reader.events(limit=2, newest=True)[0]] == [2, 3]
        assert reader.events(after_id=2) == (reader.events(limit=1, newest=True)[0], False)
        assert reader.events(limit=3)[0][1] == m.Event(
            id=2, at=1001.0, severity="good", by="anna", data=Notice("micro 8 to 4"), run="run-1",
            step=2, generation=m.Generation(1, 1), command="id", verb="resize-batch", outcome="applied",
        )  # fmt: skip
        assert [(one.step, one.loss) for one in reader.evaluations()] == [(0, 6.0), (2, 4.5)]
        assert [one.step for one in reader.evaluations(undone=True)] == [0, 2, 3]
        assert reader.series("eval_loss").steps == (0, 2) and reader.series("eval/kl").steps == (2,)
        series = reader.series("eval_loss")
        assert series.steps == (0, 2) and series.last == (6.0, 4.5)
        assert reader.series("eval_loss", columns=1).mean == (5.25,)
        found = reader.series("perplexity")
        assert found.steps == (0, 2) and found.last == (math.exp(6.0), math.exp(4.5))
    assert m.perplexity(2.0) == math.exp(2.0)
    assert [m.perplexity(None), m.perplexity(9e9), m.perplexity(2.0, "")] == [None, None, None]


def test_an_empty_record_has_nothing_and_says_so_quietly(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    open_for_writing(paths.record, RUN_SCHEMA).close()
    with RecordReader(paths) as reader:
        assert reader.last_step() is None and reader.ranks() == () and reader.evaluations() == ()
        assert reader.steps() == ((), False) and reader.events() == ((), False)
        assert reader.totals() == Totals(0, 0.0, 0.0, 0.0, {})
        for metric, per_rank in ((one.name, one.scope != "run") for one in m.METRICS.values()):
            assert reader.series(metric, 0 if per_rank else None).steps == ()


def test_tokens_and_time_are_read_at_the_ends_of_each_bucket_without_rollups(long_run: RecordReader) -> None:
    metrics = (("tokens_total", 3072.0), ("committed_at", 1.0))
    spans = ((1, LONG, 240), (100, 160, 120), (149_000, 161_000, 50), (LONG - 5, LONG + 9, 10))
    for (metric, each), (first, last, columns) in itertools.product(metrics, spans):
        series = long_run.series(metric, None, first, last, columns)
        size, standing = series.bucket_steps, [step for step in range(first, min(last, LONG) + 1) if step not in HOLE]
        assert series.steps == tuple(sorted({step // size * size for step in standing}))
        for start, low, high in zip(series.steps, series.minimum, series.maximum, strict=True):
            ends = [step for step in range(max(start, 1), min(start + size - 1, LONG) + 1) if step not in HOLE]
            assert (low, high) == (ends[0] * each, ends[-1] * each)


def test_what_cannot_be_asked_is_refused_by_name(small: RunPaths) -> None:
    refused: tuple[tuple[str, int | None, int, str], ...] = (
        ("los", None, 120, "metric: unknown metric 'los'; the metrics are loss"),
        ("wait_seconds", None, 120, "rank: wait_seconds is recorded per rank"),
        ("loss", 0, 120, "rank: loss is recorded for the whole run"),
        ("loss", None, 0, "columns: must be at least 1, not 0"),
    )
    with RecordReader(small) as reader:
        for metric, rank, columns, says in refused:
            with pytest.raises(InvalidInputError, match=says):
                reader.series(metric, rank, columns=columns)


def test_what_is_no_record_is_refused_in_a_line(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(InvalidInputError, match=r"record\.db: no such record"):
        RecordReader(paths)
    paths.record.write_bytes(b"nothing of the kind " * 100)
    with pytest.raises(InvalidInputError, match="cannot be read: file is not a database"):
        RecordReader(paths)
    paths.record.write_bytes(b"")
    with RecordReader(paths) as reader, pytest.raises(InvalidInputError, match="cannot be read: no such table"):
        reader.last_step()


def test_threads_may_share_a_reader_while_the_writer_writes(small: RunPaths) -> None:
    writer = open_for_writing(small.record, RUN_SCHEMA)
    with RecordReader(small) as reader, ThreadPoolExecutor(4) as threads:
        looks = [threads.submit(reader.last_step) for _ in range(200)]
        for number in range(5, 55):
            writer.execute(
                f"INSERT INTO steps VALUES ({number}, 1, 2, 0, 1.0, 1, 1, 0.1, 1, 1, 1, 1, 1.0, 1, NULL, 0, 1, 1, 1)"
            )
        looks.append(threads.submit(reader.last_step))
        steps = [last.step for look in looks if (last := look.result())]
    assert len(steps) == 201 and set(steps) <= set(range(4, 55))
    assert steps[-1] == 54, "no reader is stuck in an old view"
    writer.close()


def test_an_event_of_a_kind_that_a_later_program_wrote_is_its_text(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    connection = open_for_writing(paths.record, RUN_SCHEMA)
    for number, data in enumerate(({"kind": "moon-risen", "phase": 0.5}, {"kind": "note"}, "x"), 1):
        row = (number, 1.0, "run", "info", "auto", "the moon rose", msgspec.msgpack.encode(data))
        connection.execute(
            "INSERT INTO events (id, at, kind, severity, by, text, data) VALUES (?, ?, ?, ?, ?, ?, ?)", row
        )
    connection.close()
    with RecordReader(paths) as reader:
        assert [(event.data, event.text) for event in reader.events()[0]] == [
            (Notice("the moon rose"), "the moon rose")
        ] * 3
