"""The recorder over kill -9 and full disks, and metrics by name: each zoom is what the steps that stand make."""

import math
import random
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.node_agent.support.processes import kill_after, locked, python
from tests.node_agent.support.records import FIRST, check_rollups, part, rows, step
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.records import record_writer, run_db, statements
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.downsampling import spans
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import pack, unpack, values_of
from trainctl.protocol.record.schema import ROLLUP_LEVELS


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run-1").mkdir()
    return RunPaths(tmp_path / "run-1")


LOSSES = st.floats(-1e30, 1e30) | st.sampled_from([math.nan, math.inf, -math.inf, 0.0])
ACTIONS = st.one_of(
    st.tuples(st.just("commit"), st.integers(1, 40), LOSSES, st.sets(st.integers(0, 2), max_size=3)),
    st.tuples(st.just("leap"), st.integers(50, 1200), LOSSES, st.sets(st.integers(0, 1), max_size=2)),
    st.tuples(st.just("again"), st.integers(0, 5), LOSSES, st.sets(st.integers(0, 2), max_size=3)),
    st.tuples(st.just("back"), st.integers(0, 60), LOSSES, st.just(set())),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(ACTIONS, max_size=25))
def test_rollups_equal_the_rows_whatever_happens(actions: list[tuple[str, int, float, set[int]]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder))
        with RunDb(paths) as recorder:
            newest, generation = 0, FIRST
            for action, amount, loss, ranks in actions:
                if action == "commit":
                    for number in range(newest + 1, newest + 1 + amount):
                        recorder.commit(
                            step(number, generation, loss), [part(number, r, generation) for r in ranks], 0.0
                        )
                    newest += amount
                elif action == "leap":
                    newest += amount
                    recorder.commit(step(newest, generation, loss), [part(newest, r, generation) for r in ranks], 0.0)
                elif action == "again" and newest > amount:
                    number = newest - amount
                    parts = [part(number, rank, generation, 7.0 * rank) for rank in ranks]
                    recorder.commit(step(number, generation, loss), parts, 0.0)
                elif action == "back":
                    newest = max(0, newest - amount)
                    recorder.retract_after(newest)
                    generation = generation.next()
        check_rollups(paths)


WRITER = """
    import sys
    from pathlib import Path
    from trainctl.node_agent.records.run_db import RunDb
    from trainctl.protocol import messages as m
    from trainctl.protocol.messages.events import NoteWritten
    from trainctl.protocol.record.paths import RunPaths

    recorder = RunDb(RunPaths(Path(sys.argv[1])))
    last = recorder.last_state().step
    number, g = last.step if last else 0, m.Generation(1, 1)
    while True:
        number += 1
        work = (m.RankWork(0, (m.Range(number, 1),), 1),)
        recorder.plan(m.StepPlan(run="run-1", generation=g, seq=number, kind="train", step=number, plan_version=1,
            cursor=number, global_batch=1, work=work, learning_rate=0.1, divisor=1.0), 0.0, durable=number % 7 == 0)
        recorder.commit(m.StepCommitted(run="run-1", generation=g, step=number, committed_at=0.0, loss=float(number),
            weight=1.0, samples=1, learning_rate=0.1, grad_norm=1.0, cursor=number, global_batch=1, plan_version=1,
            step_seconds=1.0, tokens_total=1.0), [m.RankStep(run="run-1", generation=g, step=number, rank=0, node="a",
            tokens=1.0, samples=1, micro_batch=1, replays=0, step_seconds=1.0, phases=m.Phases(1.0))], 0.0)
        event = recorder.event(0.0, NoteWritten(str(number)), "info", "writer")
        recorder.flush()
        print(number, event.id, flush=True)
"""


def test_killing_the_writer_ten_times_loses_nothing_it_acknowledged(paths: RunPaths) -> None:
    chance = random.Random(7)
    acknowledged = (0, 0)
    for _ in range(10):
        lines = kill_after(python(WRITER, str(paths.directory)), chance.randint(1, 80))
        whole = [tuple(map(int, text.split())) for text in lines]
        acknowledged = max(acknowledged, *whole)  # type: ignore[type-var]
        with RecordReader(paths) as reader:
            last = reader.last_step()
            assert last is not None and last.step >= acknowledged[0]
            assert reader.events(newest=True, limit=1)[0][0].id >= acknowledged[1]
    assert rows(paths, "SELECT count(*), min(step), max(step) FROM steps") == [(last.step, 1, last.step)]
    assert rows(paths, "SELECT count(*) FROM rank_steps") == [(last.step,)]
    assert rows(paths, f"SELECT max(step) >= {last.step} FROM plans") == [(1,)]
    check_rollups(paths)


REFUSED = """
    import resource, sys, time
    from pathlib import Path
    from trainctl.node_agent.records import record_writer
    from trainctl.node_agent.records.run_db import RunDb
    from trainctl.protocol import messages as m
    from trainctl.protocol.messages.events import NoteWritten
    from trainctl.protocol.record.paths import RunPaths

    record_writer.RETRY_SECONDS = 0.05
    paths = RunPaths(Path(sys.argv[1]))
    recorder = RunDb(paths)
    ballast = paths.record.with_suffix(".ballast")
    assert ballast.exists() and recorder.problem is None

    def commit(number):
        recorder.commit(m.StepCommitted(run="run-1", generation=m.Generation(1, 1), step=number, committed_at=0.0,
            loss=1.0, weight=1.0, samples=1, learning_rate=0.1, grad_norm=1.0, cursor=number, global_batch=1,
            plan_version=1, step_seconds=1.0, tokens_total=1.0), [], 0.0)

    # No file may grow past this size: from the operating system, as a full disk's refusal is.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    number = 0
    while not recorder.is_refused:
        number += 1
        assert number < 1000, "nothing was refused"
        commit(number)
        recorder.flush()
    assert not ballast.exists(), "there was room to give up"
    said = recorder.problem
    assert "the disk refuses it" in said, said
    for _ in range(600):
        number += 1
        commit(number)
        recorder.event(0.0, NoteWritten("waits"), "info", "a")
    time.sleep(0.2)
    assert recorder.problem == said, "still refused, and said in the same words"
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    while recorder.is_behind or recorder.problem is not None or not ballast.exists():
        time.sleep(0.02)
    recorder.close()
    print(number)
"""


def test_a_disk_that_refuses_holds_nothing_up_and_loses_nothing(paths: RunPaths) -> None:
    process = python(REFUSED, str(paths.directory))
    output, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    with RecordReader(paths) as reader:
        last = reader.last_step()
        assert last is not None and last.step == int(output)
    assert rows(paths, "SELECT count(*) FROM steps") == [(last.step,)]
    assert rows(paths, "SELECT count(*), max(id) FROM events") == [(600, 600)]
    check_rollups(paths)


def test_what_waits_in_memory_is_bounded_and_what_is_lost_is_said(paths, monkeypatch):
    monkeypatch.setattr(record_writer, "WAITING_WRITES", 5)
    monkeypatch.setattr(record_writer, "BUSY_SECONDS", 0.0)
    with RunDb(paths) as recorder:
        with locked(paths.record) as pid:
            for number in range(1, 11):
                recorder.commit(step(number), [], 0.0)
            assert not recorder.flush()
            assert f"record.db: locked by process {pid} (" in (recorder.problem or "")
        until(lambda: not recorder.is_behind, what="the writes that waited")
        assert "5 writes were lost" in (recorder.problem or "")
        # Which ones are kept depends on which the writer was trying to write as the others came.
        assert rows(paths, "SELECT count(*) FROM steps") == [(5,)]


def test_what_is_being_written_is_not_dropped_and_what_is_dropped_is_not_said_to_be_written(paths, monkeypatch):
    monkeypatch.setattr(record_writer, "WAITING_WRITES", 5)
    monkeypatch.setattr(record_writer, "WRITES_AT_ONCE", 1)
    RunDb(paths).close()
    writer, begun, may_end, written, said = record_writer.RecordWriter(paths.record), Event(), Event(), [], []

    def first(_) -> None:
        written.append(0)
        begun.set()
        may_end.wait(HANG_SECONDS)

    writer.put(first)
    begun.wait(HANG_SECONDS)
    writer.put(lambda _: written.append(1))
    settling = Thread(target=lambda: said.append(writer.settle()))
    settling.start()
    until(lambda: writer._changed._waiters, what="the thread that waits for both")  # type: ignore[attr-defined]
    for number in range(2, 9):
        writer.put(lambda _, number=number: written.append(number))
    may_end.set()
    settling.join()
    assert said == [False]
    assert writer.settle()
    assert written == [0, 5, 6, 7, 8] and "4 writes were lost" in writer.problem
    writer.close()


NAME = "user:reward"


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
