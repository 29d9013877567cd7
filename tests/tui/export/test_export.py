"""A run's tables in every format, from its directory and through an agent, and what goes wrong told in one line."""

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.tui.support import run_directory

from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.cli import agent_call, main
from trainctl.tui.export import writers
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
