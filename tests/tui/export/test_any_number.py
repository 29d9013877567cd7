"""A NaN, an infinity, a value that isn't known and a huge one: each stays what it is, from the record to what a person
sees."""

import csv
import io
import json
import math
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.tui.support.cli_calls import call
from tests.tui.support.recorded import rank_step, run_view, snapshot

from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.cli import tables

NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf, "null": None, "huge": 1e15}
UNBOUNDED = ("loss", "learning_rate", "grad_norm")
"""Numbers of a guest's step that may be anything."""


@pytest.fixture(params=NUMBERS)
def number(request: pytest.FixtureRequest) -> float | None:
    return NUMBERS[request.param]


@pytest.fixture
def attached(tmp_path: Path, number: float | None) -> Iterator[Path]:
    """The directory of an attached run, all of whose numbers are the one."""
    db = AgentDb(tmp_path / "agent.db")
    guests = GuestRuns("box", tmp_path, db, lambda _: None)
    values = {} if number is None else {"clip_scale": number, "own": number}
    part = m.GuestPart(rank=0, values=values | ({} if number is None else {"memory_bytes": number}))
    step = m.GuestStep(
        step=1, committed_at=2.0, step_seconds=0.5, values=values, parts=(part,), **dict.fromkeys(UNBOUNDED, number)
    )  # fmt: skip
    guests.take(m.AttachRun(rid="r", run="a", name="mine", started_at=1.0, ranks=(m.GuestRank(0),)))
    guests.take(m.RunSteps(rid="r", run="a", steps=(step,)))
    guests.live[0].recorder.flush()
    guests.close()
    db.close()
    yield tmp_path / "runs" / "a"


def is_same(one: Any, other: Any) -> bool:
    return one == other or (isinstance(one, float) and isinstance(other, float) and one != one and other != other)


def floats(kind: type[msgspec.Struct], with_none: bool) -> list[str]:
    """The fields of numbers, those that may be unknown or all."""
    hints = typing.get_type_hints(kind)
    return [name for name, hint in hints.items() if hint == float | None or (hint is float and not with_none)]


def test_every_number_of_a_step_and_of_a_part_is_read_as_it_was_recorded(tmp_path: Path, number: float | None) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    paths, view = RunPaths(tmp_path / "runs" / "a"), run_view()
    last = snapshot(view).last_step
    assert last is not None
    names = {*floats(m.StepCommitted, number is None)} - {"committed_at"}
    assert {"loss", "learning_rate", "weight"} <= names
    step = msgspec.structs.replace(last, step=1, **dict.fromkeys(names, number))
    own = {*floats(m.RankStep, number is None)}
    phases = m.Phases() if number is None else m.Phases(*[number] * len(m.PHASES))
    values = {} if number is None else dict.fromkeys((*m.RANK_COLUMNS, "own"), number)
    part = msgspec.structs.replace(
        rank_step(view, 1, 0), phases=phases, values=values, **dict.fromkeys(own, number)
    )  # fmt: skip
    with RunDb(paths, resumable=False) as recorder:
        recorder.commit(step, (part,), 2.0)
        recorder.flush()
    with RecordReader(paths) as reader:
        kept, (kept_part,) = reader.last_step(), reader.rank_steps(1)
        assert all(is_same(getattr(kept, name), number) for name in names)
        assert all(is_same(getattr(kept_part, name), number) for name in own)
        assert all(is_same(value, number) for value in kept_part.values.values())
        assert len(kept_part.values) == len(values)
        assert number is None or all(is_same(getattr(kept_part.phases, name), number) for name in m.PHASES)


def exported(directory: Path, kind: str, what: str = "steps") -> str:
    file = directory.parent / f"{what}.{kind}"
    assert call("export", directory, "--what", what, "--format", kind, "--output", file).returncode == 0
    return file.read_text("utf-8")


def test_exports_say_which(attached: Path, number: float | None) -> None:
    names = (*UNBOUNDED, "clip_scale")
    row = json.loads(exported(attached, "jsonl"), parse_constant=pytest.fail)
    assert all(is_same(row[name] and float(row[name]), number) for name in names)
    (cells,) = csv.DictReader(io.StringIO(exported(attached, "csv")))
    assert all(is_same(float(cells[name]) if cells[name] else None, number) for name in names)
    assert {cells[name] for name in ("samples", "tokens", "tokens_total", "weight", "weight_total")} == {""}
    (rank,) = csv.DictReader(io.StringIO(exported(attached, "csv", "ranks")))
    assert is_same(float(rank["memory_bytes"]) if rank["memory_bytes"] else None, number)


def test_what_a_person_reads_says_which(attached: Path, number: float | None) -> None:
    with RecordReader(attached) as reader:
        step = reader.last_step()
    assert step is not None
    word = {"nan": "nan", "inf": "inf", "-inf": "-inf", "None": "n/a"}.get(str(number), "1e15")
    assert f"loss {word}" in tables.step_line(step)
    assert f"lr {word.replace('1e15', '1.00e15')}" in tables.step_line(step)
    view = msgspec.structs.replace(run_view(), learning_rate=number)
    shown = msgspec.structs.replace(snapshot(view), last_step=step)
    assert f"learning rate {word}" in tables.status_text(shown)
    page = attached.parent / "report.html"
    assert call("report", attached, "--html", page).returncode == 0
    assert page.stat().st_size


def test_the_agent_s_next_view_has_the_number_of_the_last(attached: Path, number: float | None) -> None:
    db = AgentDb(attached.parent.parent / "agent.db")
    guests = GuestRuns("box", attached.parent.parent, db, lambda _: None)
    known = db.known_run("a")
    assert known is not None
    guests.take_up(known)
    assert is_same(guests.live[0].view.learning_rate, number)
    guests.close()
    db.close()
