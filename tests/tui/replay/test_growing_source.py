"""A simulated run on screen while the simulator still writes its record, and when it has ended."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_agent.support.scenarios import files
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
