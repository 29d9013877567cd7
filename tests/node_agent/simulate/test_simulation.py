"""Simulated runs: the real conductor over simulated ranks. The same seed gives the same record."""

import asyncio
import os
import signal
import sqlite3
from pathlib import Path
from typing import get_args

import pytest
from tests.node_agent.support.scenarios import events_of, files, simulate, steps_of
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.simulate import scenario
from trainctl.node_agent.simulate.bulk_record import BulkRecord
from trainctl.node_agent.simulate.simulated_agents import SimulatedAgents
from trainctl.node_agent.simulate.simulation import Simulation, outcome
from trainctl.protocol.batch.split import ShareCost, slowest, split
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import VIEW_KEY, RecordReader
from trainctl.protocol.record.rollups import rebuild_rollups
from trainctl.tui.export.rows import What, of_record

THREE = {name: {"samples_per_second": rate} for name, rate in (("a", 8.0), ("b", 4.0), ("c", 2.0))}
ALL_TABLES = {
    "evaluate": {"every_steps": 20}, "checkpoint": {"every_steps": 15},
    "samples": {"prompts": ["Once"], "every_steps": 25}, "group": {"sync_weights_every": 30},
}  # fmt: skip


def exported(directory: Path) -> dict[str, list]:
    return {what: [page for page in of_record(directory, what) if page] for what in get_args(What)}


def test_the_same_seed_gives_the_same_export_and_another_seed_another(tmp_path):
    faulty = {"a": {"samples_per_second": 8.0, "drift": 0.3}, "b": {"samples_per_second": 4.0, "mtbf_hours": 0.02}}
    faulty["b"] |= {"model_gb": 10.0, "sample_gb": 1.0, "memory_gb": 20.0, "load_seconds": 5.0}
    first, played = simulate(tmp_path, faulty, seed=3, name="first", **ALL_TABLES)
    second, _ = simulate(tmp_path, faulty, seed=3, name="second", **ALL_TABLES)
    other, _ = simulate(tmp_path, faulty, seed=4, name="other", **ALL_TABLES)
    assert played.deaths
    found = exported(first.paths.directory)
    # No metric of this run is its own: that table is empty.
    assert [what for what, pages in found.items() if not pages] == ["metrics"]
    assert repr(found) == repr(exported(second.paths.directory))
    assert repr(found["steps"]) != repr(exported(other.paths.directory)["steps"])


def test_a_run_finishes_and_each_step_has_its_part_of_each_rank(tmp_path):
    simulation, played = simulate(tmp_path, THREE, batch=14)
    assert played.ended.state == "finished"
    assert [step.step for step in steps_of(simulation)] == [*range(1, 61)]
    with RecordReader(simulation.paths) as reader:
        parts = reader.parts_between(1, 60)
        assert len(parts) == 3 * 60
        assert sum(part.samples for part in parts) == 14 * 60
        view = reader.meta(VIEW_KEY)
    assert view is not None and '"simulated":true' in view
    (notice, *_) = events_of(simulation)
    assert notice.text.startswith("simulated run: no model was trained")


def test_rebalancing_from_even_shares_reaches_the_best_split(tmp_path):
    simulation, played = simulate(tmp_path, THREE, steps=150, batch=42, group={"first_shares": "even"})
    assert played.lead.actions["auto:rebalance"] >= 1
    costs = {
        rank: ShareCost.at(StepModel(device.curve, device.step_seconds), 2)
        for rank, device in simulation.scenario.devices.items()
    }
    best = slowest(split(42, costs), costs)
    settings = simulation.lead.conductor.durable.settings
    reached = slowest({rank: setting.share for rank, setting in settings.ranks.items()}, costs)
    assert reached <= 1.05 * best


def test_a_death_makes_the_group_form_without_the_rank_until_it_is_back(tmp_path):
    nodes = {**THREE, "b": {"samples_per_second": 4.0, "fails_at": [20], "load_seconds": 10.0}}
    simulation, played = simulate(tmp_path, nodes, batch=14)
    assert (played.ended.state, played.deaths, played.returns) == ("finished", 1, 0)
    steps = steps_of(simulation)
    assert [step.cursor for step in steps] == [14 * step for step in range(1, 61)]
    texts = [event.text for event in events_of(simulation)]
    assert any(text.startswith("b is lost: was ended by a simulated failure in step 20") for text in texts)
    assert any(text.startswith("b rejoins") for text in texts)
    with RecordReader(simulation.paths) as reader:
        assert {part.rank for part in reader.rank_steps(60)} == {0, 1, 2}
        alone = {step.step: {part.rank for part in reader.rank_steps(step.step)} for step in steps}
    assert {0, 2} in alone.values()


def test_without_its_last_rank_a_run_goes_back_to_its_checkpoint(tmp_path):
    nodes = {"a": {"samples_per_second": 8.0, "fails_at": [33]}}
    simulation, played = simulate(tmp_path, nodes, checkpoint={"every_steps": 10})
    assert (played.ended.state, played.deaths, played.returns) == ("finished", 1, 1)
    assert [step.step for step in steps_of(simulation)] == [*range(1, 61)]
    assert any(event.text.endswith("later steps are repeated") for event in events_of(simulation))


def test_a_rank_that_runs_out_of_memory_goes_on_with_a_smaller_micro_batch(tmp_path):
    small = {"model_gb": 10.0, "sample_gb": 4.0, "memory_gb": 20.0}
    nodes = {name: {**table, **small} for name, table in THREE.items()}
    simulation, played = simulate(tmp_path, nodes, batch=42, micro=8)
    assert played.ended.state == "finished"
    settings = simulation.lead.conductor.durable.settings
    assert all(setting.micro_in_force <= 2 for setting in settings.ranks.values())


@pytest.mark.parametrize(("gbit", "efficiency"), [(1.0, 0.6), (10.0, 0.9)])
def test_a_faster_link_helps_by_what_the_sum_takes(tmp_path, gbit, efficiency):
    """Two equal nodes whose sum of 0.8 GB takes 6.4 s at 1 Gbit/s, beside passes of 6 s."""
    nodes = {name: {"samples_per_second": 1.0, "link_gbit": gbit, "noise": 0.0} for name in "ab"}
    simulation, played = simulate(tmp_path, nodes, steps=20, batch=12, parameters=200_000_000)
    made = outcome(simulation.scenario, played, simulation.paths)
    assert made["step_seconds"] == pytest.approx(6.0 + 6.4 / gbit, rel=0.01)
    assert made["efficiency"] == pytest.approx(6.0 / (6.0 + 6.4 / gbit), rel=0.02)
    assert (made["efficiency"] > efficiency) == (gbit > 1)


def test_auto_begins_with_the_peak_of_the_described_passes_and_no_group_beats_its_nodes_apart(tmp_path):
    passes = [[1, 0.1], [2, 0.11], [4, 0.12], [8, 0.5], [16, 2.0]]
    nodes = {name: {"passes": passes, "link_gbit": 100.0, "noise": 0.0} for name in ("a", "b")}
    cluster, run = files(tmp_path, nodes, 30, 32, "auto")
    found = scenario.read(cluster, run, seed=0, steps=None, parameters=1000)
    simulation = Simulation(found, tmp_path / "state")
    result = outcome(found, simulation.play(), simulation.paths)
    assert result["micro_batches"] == {"a": 4, "b": 4}
    assert 0.9 < result["efficiency"] <= 1.0


NODES = {
    "a": {"samples_per_second": 8.0, "model_gb": 1.0, "memory_gb": 4.0},
    "b": {"samples_per_second": 4.0, "fails_at": [23]},
}
ROLLUPS = "SELECT * FROM rollups ORDER BY metric, rank, bucket_steps, bucket"


def test_rollups_made_in_bulk_are_those_made_step_by_step(tmp_path):
    simulation, _ = simulate(tmp_path, NODES, steps=137)
    with sqlite3.connect(simulation.paths.record) as connection:
        bulk = connection.execute(ROLLUPS).fetchall()
        rebuild_rollups(connection, 1, 137)
        single = connection.execute(ROLLUPS).fetchall()
    assert [row[:5] for row in bulk] == [row[:5] for row in single]
    for made, known in zip(bulk, single, strict=True):
        assert made[5:] == pytest.approx(known[5:], rel=1e-9, abs=1e-12)


def test_a_full_disk_ends_it_and_closes_the_record(tmp_path):
    record = BulkRecord(RunPaths(tmp_path))
    connection = record._writer._file.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count={pages}")
    for number in range(2000):
        record.event(float(number), e.Notice("text " * 20), "info", "test")
    with pytest.raises(RefusedError, match="full: free some space, or give --output another folder"):
        record.close()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        connection.execute("SELECT 1")


CLUSTER = "[nodes.a.simulated]\nsamples_per_second = 10\n[nodes.b.simulated]\nsamples_per_second = 10\n"


async def test_a_signal_before_they_serve_ends_all_of_them(tmp_path):
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    async with SimulatedAgents(tmp_path / "cluster.toml", tmp_path / "state") as simulated:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(HANG_SECONDS):
            await simulated.serve()
