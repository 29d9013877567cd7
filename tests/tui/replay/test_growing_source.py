"""Simulated runs: made by `trainctl simulate`, and on screen while the record is still written."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_agent.support.scenarios import files
from tests.tui.support.cli_calls import assert_one_line, call, call_json
from tests.tui.support.driving import body, until

from trainctl.node_agent.simulate import scenario
from trainctl.node_agent.simulate.simulation import Simulation
from trainctl.protocol.messages import SnapshotRequest
from trainctl.tui.replay.replay_app import GrowingSource, ReplayApp

NODES = {"a": {"samples_per_second": 8.0}, "b": {"samples_per_second": 4.0}}
FIRST, STEPS = 20, 60


@pytest.fixture
def simulation(tmp_path: Path) -> Iterator[Simulation]:
    """One whose record has the first steps."""
    cluster, run = files(tmp_path, NODES, STEPS, 12, evaluate={"every_steps": 15})
    found = scenario.read(cluster, run, seed=1, steps=None, parameters=1000)
    made = Simulation(found, tmp_path / "runs" / "try-simulated-1")
    made.begin()
    advance(made, FIRST)
    yield made
    made.lead.close()


def advance(simulation: Simulation, step: int) -> None:
    """Play up to this step, or to the end of the run."""
    while simulation.lead.ended is None and simulation.lead.conductor.progress.step < step:
        simulation.queue.step()
    simulation.lead.flush()


async def test_the_end_moves_on_with_the_record_until_the_run_has_ended(simulation: Simulation) -> None:
    source = GrowingSource(simulation.paths.directory, 1000.0)
    source._advance(3600.0)
    assert (source.head.step, source.head.last, source.head.playing) == (FIRST, FIRST, True)
    advance(simulation, 40)
    source._advance(3600.0)
    assert source.head.step == source.head.last == 40
    advance(simulation, STEPS + 1)
    known = len(source.events_known)
    source._advance(3600.0)
    assert source.head.step == source.head.last == STEPS
    assert len(source.events_known) > known
    assert len({event.id for event in source.events_known}) == len(source.events_known)
    source._advance(1.0)
    assert not source.is_growing
    shown = await source.ask(SnapshotRequest, 0)
    assert shown.run is not None and (shown.run.state, shown.run.simulated) == ("finished", True)
    source.close()


async def test_the_screens_say_that_the_run_is_simulated(simulation: Simulation) -> None:
    source = GrowingSource(simulation.paths.directory, 1000.0)
    async with ReplayApp(source).run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: "REPLAY SIMULATED" in body(pilot.app))
        await until(pilot, lambda: source.head.step == FIRST)
        advance(simulation, STEPS + 1)
        await until(pilot, lambda: source.head.step == STEPS)
        await until(pilot, lambda: "FINISHED" in body(pilot.app))
    source.close()


FAILING = {"a": {"samples_per_second": 8.0}, "b": {"samples_per_second": 4.0, "fails_at": [20], "load_seconds": 5.0}}


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    cluster, run = files(tmp_path, FAILING, 50, 12)
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
