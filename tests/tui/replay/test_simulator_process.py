"""`trainctl simulate`: a record that export and replay open, a summary, and one line about what is wrong."""

from pathlib import Path

import pytest
from tests.node_agent.support.scenarios import files
from tests.tui.support.cli_calls import assert_one_line, call, call_json

NODES = {"a": {"samples_per_second": 8.0}, "b": {"samples_per_second": 4.0, "fails_at": [20], "load_seconds": 5.0}}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    cluster, run = files(tmp_path, NODES, 50, 12)
    cluster.write_text(
        cluster.read_text().replace("[nodes.a.simulated]", "[nodes.a]\nprice_per_hour = 3.6\n[nodes.a.simulated]")
    )
    return cluster, run


def exported(run: str | Path, what: str, folder: Path) -> bytes:
    file = folder / "rows.csv"
    assert call("export", run, "--what", what, "--output", file).returncode == 0
    return file.read_bytes()


def test_a_summary_a_record_and_the_same_rows_again(paths: tuple[Path, Path], tmp_path: Path) -> None:
    command = ["simulate", *paths, "--parameters", "1000", "--seed", "7", "-o", tmp_path / "state"]
    made = call(*command)
    assert made.returncode == 0, made.stderr
    assert "nothing was trained" in made.stdout
    assert "trainers died: 1; returns to a checkpoint: 0" in made.stdout
    assert "cost " in made.stdout and "USD" in made.stdout
    (directory,) = (tmp_path / "state" / "simulated" / "runs").iterdir()
    assert directory.name == "try-simulated-7"
    assert f"trainctl replay {directory}" in made.stdout
    again = call_json(*command)
    assert (again["state"], again["steps"], again["deaths"], again["simulated"]) == ("finished", 50, 1, True)
    assert 0 < again["efficiency"] <= 1.01
    assert again["cost"] == pytest.approx(again["seconds"] / 1000, rel=0.3)
    for what in ("steps", "ranks", "events", "hosts"):
        first, second = (exported(run, what, tmp_path) for run in (directory, again["run_directory"]))
        assert first == second != b""


def test_fewer_steps_and_a_run_id_in_the_users_folder(paths: tuple[Path, Path], tmp_path: Path) -> None:
    made = call_json("simulate", *paths, "--parameters", "1000", "--steps", "5")
    assert made["steps"] == 5
    assert exported(made["run"], "steps", tmp_path).count(b"\n") == 1 + 5


def test_bad_input_is_one_line(paths: tuple[Path, Path], tmp_path: Path) -> None:
    cluster, run = paths
    assert_one_line(call("simulate", cluster, run), 2, "model.path", "give --parameters")
    assert_one_line(call("simulate", cluster, tmp_path / "gone.toml"), 2, "gone.toml", "no such run file")
    assert_one_line(call("simulate", cluster, run, "--speed", "2"), 2, "--speed", "--watch")
    assert_one_line(call("simulate", cluster, run, "--watch"), 2, "--watch", "terminal")
    (tmp_path / "file").write_text("")
    refused = call("simulate", cluster, run, "--parameters", "1", "-o", tmp_path / "file")
    assert_one_line(refused, 2, "--output", "file")
