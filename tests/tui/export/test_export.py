"""A run's tables in every format, from its directory and through an agent, and what goes wrong told in one line."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.in_process import BlockingAgent, blocking_cluster
from tests.cluster.run_files import NODE
from tests.node_agent.support.records import part, step
from tests.tui.support import run_directory
from tests.tui.support.recorded import run_view

from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.messages import HistoryRequest
from trainctl.protocol.record.downsampling import choose
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.cli import agent_call, main, runs
from trainctl.tui.export import writers
from trainctl.tui.export.mirror.run_source import AgentSource, DirectorySource, Evaluated, questions, values
from trainctl.tui.export.rows import COLUMNS


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_directory.make(tmp_path_factory.mktemp("state") / "node" / "runs" / "demo-1")


@pytest.fixture
def reader(directory: Path) -> Iterator[RecordReader]:
    with RecordReader(directory) as opened:
        yield opened


KEPT = run_directory.STEPS - len(run_directory.AWAY)
COUNTS = {"steps": KEPT, "ranks": KEPT * run_directory.NODES, "metrics": KEPT, "hosts": 1}


@pytest.mark.parametrize("what", COLUMNS)
def test_csv_and_json_lines_hold_every_row(
    directory: Path, reader: RecordReader, what: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    counts = {**COUNTS, "samples": len(reader.samples()[0]), "evaluations": len(reader.evaluations())}
    count = counts.get(what, len(reader.events(limit=500)[0]))
    assert count
    assert main.main(["export", str(directory), "--what", what]) == 0
    rows = list(csv.DictReader(io.StringIO(capfdbinary.readouterr().out.decode())))
    assert main.main(["export", str(directory), "--what", what, "--format", "jsonl"]) == 0
    objects = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert len(rows) == len(objects) == count
    for row, found in zip(rows, objects, strict=True):
        assert list(row) == list(found) == list(COLUMNS[what])
        for name, kind in COLUMNS[what].items():
            assert found[name] == (
                json.loads(row[name]) if kind in (bool, dict) else kind(row[name]) if row[name] else None
            )


def test_the_values_are_the_records(directory: Path, reader: RecordReader, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    assert main.main(["export", str(directory), "--format", "jsonl", "--output", str(file)]) == 0
    last = json.loads(file.read_text().splitlines()[-1])
    step = reader.last_step()
    assert (last["step"], last["loss"], last["generation"]) == (step.step, step.loss, "g1.1")
    assert [found.name for found in tmp_path.iterdir()] == ["steps.jsonl"]


def test_events_have_their_data_and_what_they_undo(
    directory: Path, reader: RecordReader, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    assert main.main(["export", str(directory), "--what", "events", "--format", "jsonl"]) == 0
    told = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    events, _ = reader.events(limit=500)
    assert [row["data"] for row in told] == [json.loads(msgspec.json.encode(event.data)) for event in events]
    assert [row["undoes"] for row in told] == [event.undoes for event in events]
    assert told[0]["data"]["kind"]


def test_parquet_is_the_same_table(directory: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for what, columns in COLUMNS.items():
        file = tmp_path / f"{what}.parquet"
        assert main.main(["export", str(directory), "--what", what, "--format", "parquet", "--output", str(file)]) == 0
        table = parquet.read_table(file)
        assert table.column_names == list(columns)
        assert table.num_rows == COUNTS.get(what, table.num_rows) > 0


def test_a_failed_export_leaves_what_was_there(
    directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.csv"
    file.write_text("before")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    bad = tmp_path / "nowhere" / "x.csv"
    for arguments, words in (
        (["--format", "parquet", "--output", str(file)], "pip install '.[parquet]'"),
        (["--format", "parquet"], "--output"),
        (["--output", str(bad)], "--output"),
    ):
        assert main.main(["export", str(directory), *arguments]) == 2
        said = capfd.readouterr().err
        assert words in said and said.count("\n") == 1
    assert file.read_text() == "before"
    assert [found.name for found in tmp_path.iterdir()] == ["steps.csv"]


def test_a_run_that_cannot_be_read_or_asked_for_writes_nothing(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_call, "ANSWER_SECONDS", 0.2)
    for words, status, says in (
        ([str(tmp_path)], 2, b"record.db"),
        (["nowhere", "--connect", "tcp://127.0.0.1:9"], 5, b"no agent"),
    ):
        assert main.main(["export", *words]) == status
        said = capfdbinary.readouterr()
        assert said.out == b"" and says in said.err


def test_a_spreadsheet_takes_no_text_for_a_formula_and_a_terminal_no_escape() -> None:
    stream = io.BytesIO()
    table = writers.open_writer("csv", "events", stream)
    table.write([("=HYPERLINK(0)", -1.5), ("-2+3", 0.0), ("@x", None), ("plain \x1b[2Jtext", 1.0)])
    rows = list(csv.reader(io.StringIO(stream.getvalue().decode())))
    assert rows[1:] == [["'=HYPERLINK(0)", "-1.5"], ["'-2+3", "0.0"], ["'@x", ""], ["plain �[2Jtext", "1.0"]]


STEPS, RANKS, METRICS = 620, 3, 20
NUMBERS = [*range(1, 401), *range(10**9, 10**9 + (STEPS - 400) * 2048, 2048)]
"""The steps' own: from the 401st on, those of an environment."""


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[BlockingAgent]:
    """It has one run, which ended, with more metrics than one request may name."""
    paths = RunPaths(tmp_path / "state" / NODE / "runs" / "run-1")
    paths.directory.mkdir(parents=True)
    view = msgspec.structs.replace(
        run_view(RANKS, step=NUMBERS[-1], steps=NUMBERS[-1]), run="run-1", state="finished",
        eval_values=(("eval/kl", 0.25), ("eval/entropy", 3.5)),
    )  # fmt: skip
    with AgentDb(tmp_path / "state" / NODE / "agent.db") as db:
        db.add_run("run-1", "demo", 1000.0, "finished")
    with RunDb(paths) as recorder:
        recorder.set_meta("view", msgspec.json.encode(view).decode())
        for number in NUMBERS:
            parts = [
                msgspec.structs.replace(part(number, rank), values=own_values(number, rank)) for rank in range(RANKS)
            ]
            whole = msgspec.structs.replace(step(number), values={"user:whole": 1.0 * number})
            recorder.commit(whole, parts, 1000.0)
        recorder.evaluation(NUMBERS[-2], 2000.0, 1.25, 10.0, 1.0, {"eval/kl": 0.25, "eval/entropy": 3.5})
    with blocking_cluster(tmp_path, (NODE,)) as cluster:
        yield cluster[NODE]


def own_values(number: int, rank: int) -> dict[str, float]:
    """One of them comes only now and then."""
    every = {f"user:metric_{place}": number + rank / 10 + place / 1000 for place in range(METRICS)}
    return every if number % 50 == 0 else {name: value for name, value in every.items() if name != "user:metric_7"}


@pytest.mark.tier("all")  # each step is written to the disk
def test_a_run_is_the_same_through_its_agent(
    agent: BlockingAgent, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "directory_of", lambda row: None)  # as if the agent were on another machine
    directory = agent.run_paths("run-1").directory
    for what in ("steps", "ranks", "metrics", "evaluations", "events", "samples", "hosts"):
        assert main.main(["export", str(directory), "--what", what]) == 0
        local = table(capfd)
        assert main.main(["export", "run-1", "--what", what, "--connect", agent.address]) == 0
        assert table(capfd) == local, what
        if what == "metrics":
            every_50th = sum(number % 50 == 0 for number in NUMBERS)
            assert len(local) == RANKS * ((METRICS - 1) * STEPS + every_50th) + STEPS
            assert [row["rank"] for row in local[:2]] == ["", "0"]
    assert main.main(["export", "another", "--what", "steps", "--connect", agent.address]) == 3
    assert capfd.readouterr().err.count("\n") == 1
    assert main.main(["report", "run-1", "--connect", agent.address]) == 0
    assert main.main(["diff", "run-1", "run-1", "--connect", agent.address]) == 0
    check_followed(agent)


def check_followed(agent: BlockingAgent) -> None:
    """Check what a mirror that follows a run shows."""
    pages = [NUMBERS[start : start + 500] for start in range(0, STEPS, 500)]
    with agent.client() as client:
        assert client.ask(HistoryRequest, "run-1", ()).own_metrics == (*sorted(own_values(50, 0)), "user:whole")
        source = AgentSource(client, "run-1")
        parts = [part for page in pages for part in source.parts(page)]
        assert source.evaluations(0, NUMBERS[-1]) == {
            NUMBERS[-2]: Evaluated(1.25, None, {"eval/kl": 0.25, "eval/entropy": 3.5})
        }
    kept = DirectorySource(agent.run_paths("run-1").directory)
    of_directory = [part for page in pages for part in kept.parts(page)]
    kept.close()
    assert [(part.step, part.rank) for part in parts] == [(part.step, part.rank) for part in of_directory]
    for told, other in zip(parts, of_directory, strict=True):
        assert {**other.values, **told.values} == other.values
        assert own_values(told.step, told.rank).items() <= told.values.items()


def table(capfd: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(capfd.readouterr().out)))


NAMES = tuple(f"user:{number}" for number in range(40))


@given(
    st.integers(1, 10**6), st.lists(st.sampled_from([1, 2, 9, 10, 37, 2_048, 10**9]), max_size=120),
    st.integers(1, 8), st.sampled_from([0, 5, 30]), st.integers(0, 10**7),
)  # fmt: skip
def test_every_step_has_a_bucket_of_its_own(
    first: int, gaps: list[int], ranks: int, raw_most: int, values_from: int
) -> None:
    steps = [first]
    for gap in gaps:
        steps.append(steps[-1] + gap)
    seen: dict[str, list[int]] = {name: [] for name in NAMES}
    told = list(questions(NAMES, steps, ranks, values_from))
    for question in told:
        names, asked = question.names, question.steps
        assert len(names) <= 16 and len(asked) * len(names) * (ranks + 1) <= 20_000
        columns = min(asked[-1] - asked[0] + 1, 2_000)
        if raw_most or asked[-1] - asked[0] >= 2_000:
            size = choose(asked[0], asked[-1], columns, raw_most=raw_most).bucket_steps
            assert len({step // size for step in asked}) == len(asked)
        for name in names:
            seen[name] += asked
    assert all(found == steps for found in seen.values())
    assert [question.columns for question in told] == [
        min(question.steps[-1] - question.steps[0] + 1, 2_000) for question in told
    ]


@pytest.mark.parametrize("apart", [1, 2_048, 10**12])
def test_a_page_of_steps_evenly_apart_is_one_request(apart: int) -> None:
    assert len(list(questions(NAMES[:16], range(apart, 501 * apart, apart), 1))) == 1


def test_what_is_no_longer_kept_singly_is_left_out() -> None:
    own = m.Series("user:0", None, 10, (20, 30), *((1.0, 2.0),) * 4)
    rank = m.Series("step_seconds", 1, 10, (20, 30), *((3.0, 4.0),) * 4)
    history = m.History(rid="r", series=(own, rank), values_from=30)
    assert list(values(history, (25, 31))) == [
        (31, None, "user:0", 2.0), (25, 1, "step_seconds", 3.0), (31, 1, "step_seconds", 4.0),
    ]  # fmt: skip
