"""The recorder: what is committed, retracted, said and read is found again, once."""

import math
import sqlite3
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import FIRST, check_rollups, part, plan, reading, rollups, rows, step

from trainctl.node_agent.records import record_file
from trainctl.node_agent.records import run_db as recorder_module
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages.events import NoteWritten, Notice
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import RUN_RANK


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    (tmp_path / "run-1").mkdir()
    return RunPaths(tmp_path / "run-1")


def test_a_restart_finds_the_last_state(paths: RunPaths) -> None:
    with RunDb(paths) as recorder:
        assert recorder.last_state().step is None and recorder.last_state().generation is None
        recorder.set_meta("name", "demo")
        for number in (1, 2, 3):
            recorder.plan(plan(number), 1000.0, durable=number == 2)
            recorder.commit(step(number), [part(number)], 1000.5)
        newest = plan(4, FIRST.next(), ("8b7c6d5e-0000-4000-8000-000000000001",))
        recorder.plan(newest, 1001.0)
        recorder.evaluation(3, 1002.0, 2.25, 512.0, 0.5, {"eval/kl": 0.125})
        said = recorder.event(1003.0, Notice("began"), "good", "auto", step=3, generation=FIRST)
    with RunDb(paths) as recorder:
        state = recorder.last_state()
        assert state.step == step(3) and state.rank_steps == (part(3),)
        assert state.plan == newest and state.seq == 4 and state.generation == FIRST.next()
        assert state.plans == (plan(1), plan(2), plan(3), newest)
        assert state.evaluation == (3, 1002.0, 2.25, 512.0, 0.5, {"eval/kl": 0.125})
        assert state.events == (said,)
        assert recorder.meta("name") == "demo" and recorder.meta("absent") is None


def test_what_a_guest_does_not_say_stays_unsaid_and_is_no_nan(paths: RunPaths) -> None:
    unsaid = {"tokens": None, "weight": None, "learning_rate": None, "cursor": None, "global_batch": None}
    silent = msgspec.structs.replace(step(1), loss=None, grad_norm=None, **unsaid)
    broken = msgspec.structs.replace(step(2, loss=math.nan), grad_norm=math.inf)
    its_part = msgspec.structs.replace(part(1), micro_batch=None)
    with RunDb(paths) as recorder:
        recorder.commit(silent, [its_part], 1000.0)
        recorder.commit(broken, [part(2)], 1001.0)
    with RecordReader(paths) as reader:
        first, second = reader.steps()[0]
        assert first == silent and reader.rank_steps(1) == (its_part,)
        assert second.loss is not None and math.isnan(second.loss) and second.grad_norm == math.inf
        found = {name: reader.series(name) for name, metric in m.METRICS.items() if metric.scope == "run"}
        assert reader.totals().weight == 3072.0
    of_both = {"step_seconds", "tokens_total", "committed_at", "clip_scale"}
    of_both |= {"samples_per_second", "steps_per_second", "seconds_per_sample"}
    of_second = {"learning_rate", "tokens_per_second", "weight_per_second", "loss_not_finite", "grad_norm_not_finite"}
    assert {name: series.steps for name, series in found.items() if series.steps} == {
        **dict.fromkeys(of_both, (1, 2)), **dict.fromkeys(of_second, (2,))
    }  # fmt: skip
    check_rollups(paths)
    assert not [key for key in rollups(paths) if key[0] in ("loss", "grad_norm")]


def test_committing_twice_changes_nothing(paths: RunPaths) -> None:
    with RunDb(paths) as recorder:
        recorder.commit(step(1), [part(1)], 1000.0)
        recorder.flush()
        before = rows(paths, "SELECT * FROM steps, rank_steps, rollups")
        recorder.commit(step(1, loss=9.0), [part(1, tokens=7.0)], 2000.0)
        recorder.evaluation(1, 5.0, 2.0, 1.0, 1.0)
        recorder.evaluation(1, 5.0, 2.0, 1.0, 1.0)
        recorder.flush()
        assert rows(paths, "SELECT * FROM steps, rank_steps, rollups") == before
        recorder.flush()
        assert rows(paths, "SELECT count(*) FROM evaluations") == [(1,)]


def test_a_row_of_the_lead_replaces_this_record_s_own_of_the_same_step(paths: RunPaths) -> None:
    """Where it differs in anything; rows that are the same are left alone, also those with a NaN."""
    ours = msgspec.structs.replace(step(2, loss=math.nan), values={"clip_scale": 0.5, "user:a": 1.0})
    with RunDb(paths) as recorder:
        for row in (step(1), ours, step(3)):
            recorder.commit(row, [part(row.step), part(row.step, 1)], 1000.0)
        recorder.flush()
        before = rows(paths, "SELECT * FROM steps, rank_steps, rollups, metric_values")
        for row in (step(1), ours, step(3)):
            recorder.known_step(row)
            recorder.known_part(part(row.step), 2000.0)
        recorder.flush()
        assert rows(paths, "SELECT * FROM steps, rank_steps, rollups, metric_values") == before
        for values in ({"clip_scale": 0.5, "user:b": 2.0}, {}):
            its = msgspec.structs.replace(ours, committed_at=5.0, seconds_total=9.0, loss=1.5, values=values)
            its_part = msgspec.structs.replace(part(2), replays=3, values={"user:tries": 8.0})
            recorder.known_step(its)
            recorder.known_part(its_part, 2000.0)
            recorder.flush()
            with RecordReader(paths) as reader:
                assert reader.steps()[0] == (step(1), its, step(3))
                assert reader.rank_steps(2) == (its_part, part(2, 1))
    assert rows(paths, "SELECT DISTINCT finished_at FROM rank_steps") == [(1000.0,)]
    check_rollups(paths)


def test_a_retracted_step_stays_marked_and_its_redo_counts(paths: RunPaths) -> None:
    with RunDb(paths) as recorder:
        for number in (1, 2):
            recorder.commit(step(number, loss=50.0), [part(number)], 1000.0)
        recorder.retract_after(1)
        assert recorder.last_state().step == step(1, loss=50.0)
        recorder.commit(step(2, FIRST.next(), loss=3.0), [part(2, 0, FIRST.next())], 1001.0)
        kept: list[m.Kept] = []
        recorder.on_kept = kept.append
        recorder.add_part(part(1, 1), 1000.0)  # it comes late
        assert kept == [m.KeptPart(part=part(1, 1))], "copies may have its step with more values"
        recorder.flush()
        with RecordReader(paths) as reader:
            assert reader.series("loss").last == (50.0, 3.0)
            assert reader.rank_steps(2) == (part(2, 0, FIRST.next()),)
            assert reader.rank_steps(1) == (part(1), part(1, 1))
            assert reader.ranks() == (0, 1), "also before any bucket is made"
        assert not rollups(paths), "a bucket is made once a step after it is there"
        recorder.commit(step(10, FIRST.next()), [], 1002.0)
    check_rollups(paths)
    assert rows(paths, "SELECT step, n, retracted FROM steps") == [(1, 1, 0), (2, 1, 1), (2, 2, 0), (10, 2, 0)]
    assert rollups(paths)[("loss", RUN_RANK, 10, 0)] == pytest.approx((2, 3.0, 50.0, 26.5, 3.0))


def test_events_keep_counting_after_a_restart_and_long_ones_are_cut(paths: RunPaths) -> None:
    with RunDb(paths) as recorder:
        assert [recorder.event(0.0, NoteWritten(text), "info", "anna").id for text in "ab"] == [1, 2]
    with RunDb(paths) as recorder:
        event = recorder.event(0.0, NoteWritten("x" * 5000), "info", "anna")
        assert event.id == 3 and len(event.text) == recorder_module.TEXT_CHARACTERS
        assert recorder.last_state().events[-1] == event


def test_host_readings_are_thinned_and_old_ones_go(paths: RunPaths) -> None:
    with RunDb(paths) as recorder:
        for second in range(60):
            recorder.host(reading(1000.0 + second))
        recorder.flush()
        assert rows(paths, "SELECT at FROM host") == [(1000.0 + 10 * ten,) for ten in range(6)]
        recorder.flush()
        with RecordReader(paths) as reader:
            first, place = reader.host_readings(0, 4)
            second, end = reader.host_readings(place, 4)
            assert (len(first), len(second), reader.host_readings(end, 4)[0]) == (4, 2, ())
        late = 1000.0 + recorder_module.HOST_KEPT_SECONDS
        for ten in range(10):
            recorder.host(reading(late + 60 + 10 * ten))
        recorder.flush()
        kept = [at for (at,) in rows(paths, "SELECT at FROM host")]
        assert len(kept) == 10 and min(kept) == late + 60


def test_plans_go_once_they_are_many_and_no_checkpoint_needs_them(paths: RunPaths, monkeypatch: Any) -> None:
    monkeypatch.setattr(recorder_module, "PLANS_KEPT", 100)
    monkeypatch.setattr(recorder_module, "CHECKPOINTS_EVERY_PLANS", 10)
    kept = "SELECT min(seq), max(seq), count(*) FROM plans"
    with RunDb(paths) as recorder:
        for number in range(1, 301):
            recorder.plan(plan(number), 1000.0)
        recorder.flush()
        assert rows(paths, kept) == [(1, 300, 300)]  # without a checkpoint a resume begins at the first step
        for step_kept in (120, 250):
            paths.checkpoint(step_kept).mkdir(parents=True)
        for number in range(301, 451):
            recorder.plan(plan(number), 1000.0)
        recorder.flush()
        assert rows(paths, kept) == [(121, 450, 330)]  # what the older checkpoint needs
        paths.checkpoint(120).rmdir()
        for number in range(451, 701):
            recorder.plan(plan(number), 1000.0)
        recorder.flush()
        assert rows(paths, kept) == [(251, 700, 450)]
        assert recorder.train_plan(251) == plan(251)
    with RunDb(paths, resumable=False) as recorder:
        for number in range(701, 1201):
            recorder.plan(plan(number, FIRST.next()), 1000.0)
        recorder.flush()
        assert rows(paths, kept) == [(1101, 1200, 100)]
        assert recorder.last_state().seq == 1200


def test_drifts_are_kept_by_rank_and_a_repeated_one_counts(paths: RunPaths) -> None:
    with RunDb(paths) as recorder:
        for number in range(1, 41):
            recorder.commit(step(number), [part(number, 0), part(number, 2)], 1000.0)
            if number % 10 == 0:
                recorder.drifts(number, 1000.0 + number, {0: 0.0, 2: number * 1e-8})
        recorder.drifts(20, 2000.0, {0: 0.0, 2: 5e-7})
        recorder.drifts(40, 2000.0, {0: math.nan, 2: math.inf})
    with RecordReader(paths) as reader:
        series = reader.series("drift", 2, columns=100)
        assert (series.steps, series.last) == ((10, 20, 30), pytest.approx((1e-7, 5e-7, 3e-7)))
        assert reader.series("drift", 0, columns=1).maximum == (0.0,)
        assert reader.series("drift", 2, 25, 35).steps == (30,)
        assert reader.series("drift", 1).steps == ()


def test_a_file_that_is_no_record_of_ours_is_refused_in_a_line(paths: RunPaths) -> None:
    paths.record.write_bytes(b"not a database, but long enough to be looked at" * 100)
    with pytest.raises(InvalidInputError, match=r"record\.db: cannot be read: file is not a database"):
        RecordReader(paths)
    paths.record.unlink()
    for schema, problem in ((99, "schema 99 is newer"), (1, r"schema 1 is older .*; use trainctl 0\.2\.0 .*")):
        connection = sqlite3.connect(paths.record)
        connection.execute(f"PRAGMA user_version={schema}")
        connection.close()
        for open_record in (RunDb, RecordReader):
            with pytest.raises(InvalidInputError, match=rf"record\.db: {problem}"):
                open_record(paths)
    with pytest.raises(InvalidInputError, match="cannot be opened"):
        RunDb(RunPaths(paths.directory / "no-such-folder"))


@pytest.mark.parametrize("table", ["meta", "steps"])
def test_a_record_with_a_damaged_table_is_made_again_from_the_others(paths: RunPaths, table: str) -> None:
    with RunDb(paths) as recorder:
        recorder.set_meta("name", "demo")
        recorder.plan(plan(1), 1000.0)
        recorder.commit(step(1), [part(1)], 1000.5)
        recorder.event(1003.0, Notice("began"), "good", "auto", step=1, generation=FIRST)
    with sqlite3.connect(paths.record) as found:
        ((page,),) = found.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,)).fetchall()
        ((size,),) = found.execute("PRAGMA page_size").fetchall()
        found.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    found.close()
    with paths.record.open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    with RunDb(paths) as recorder:
        assert recorder.meta("name") == (None if table == "meta" else "demo")
        state = recorder.last_state()
        assert state.step == (None if table == "steps" else step(1)) and state.plans == (plan(1),)
        assert "record.db: was damaged; moved to record.db.damaged-" in (recorder.problem or "")
    (aside,) = paths.directory.glob("record.db.damaged-*")
    assert aside.stat().st_size > 0


def test_an_event_that_a_power_cut_took_leaves_its_id_unused(paths: RunPaths) -> None:
    """Other nodes and clients may have it. The disk has what it was last told to keep, as when ids were reserved."""
    log = paths.record.with_name("record.db-wal")
    recorder = RunDb(paths)
    kept: dict[Path, bytes] = {}
    lost = 0

    def sync(connection: sqlite3.Connection, durable: bool) -> None:
        """Note what the disk has: all that was committed before."""
        nonlocal kept
        if is_durable[0]:
            kept = {file: file.read_bytes() for file in (paths.record, log)}
        is_durable[0] = durable

    is_durable = [False]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record_file, "set_durable", sync)
        for _ in range(300):
            lost = recorder.event(1.0, Notice("lost"), "info", "auto").id
            recorder.flush()
    recorder._writer._file.close()
    recorder._writer.close()
    for file, content in kept.items():
        file.write_bytes(content)
    with RunDb(paths) as recorder:
        assert 0 < recorder.newest()[2] < lost  # by what the disk has
        first = recorder.event(2.0, Notice("resumed"), "info", "auto").id
        assert first > lost
    with RunDb(paths) as recorder:  # it was closed: no id is left out
        assert recorder.event(3.0, Notice("again"), "info", "auto").id == first + 1
