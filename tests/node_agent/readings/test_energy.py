"""Energy of a run: power times time while it is read, what isn't read a gap, and a restart goes on from the record."""

from pathlib import Path

import msgspec
import pytest
from tests.node_agent.support.records import reading

from trainctl.node_agent.readings.host import Energy, EnergyMeter, HostReader, drawn_watts
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths


def meter(*readings: tuple[float, float | None], run: str = "run-1") -> EnergyMeter:
    """With power in watts at times in seconds."""
    made = EnergyMeter()
    made.begin(run, 1000.0)
    for now, watts in readings:
        made.add(watts, now)
    return made


@pytest.mark.parametrize(
    ("readings", "joules", "gap_seconds"),
    [
        (((0, 60.0), (1, 60.0), (2, 100.0)), 140.0, 0.0),
        (((0, 60.0), (1, None), (2, None), (3, 60.0), (4, 60.0)), 60.0, 3.0),  # not readable for a while
        (((0, 60.0), (1, 60.0), (100, 60.0), (101, 60.0)), 120.0, 99.0),  # the machine slept
        (((0, None), (1, None)), None, 1.0),  # no power is ever read: n/a, never zero
    ],
)
def test_power_is_added_up_and_what_is_not_read_is_a_gap_and_not_guessed(readings, joules, gap_seconds) -> None:
    assert drawn_watts([m.GpuReading("a", power_watts=20.0), m.GpuReading("b")]) == 20.0
    assert drawn_watts([m.GpuReading("b")]) is None
    energy = meter(*readings).energy
    assert energy is not None
    assert (energy.joules, energy.gap_seconds) == (joules, gap_seconds)


def test_another_run_begins_at_nothing_and_no_run_adds_nothing() -> None:
    made = meter((0, 60.0), (1, 60.0))
    made.pause()
    for now in (2.0, 3.0, 4.0):
        made.add(60.0, now)
    assert made.energy == Energy(1000.0, 60.0)  # of the run that has ended
    made.begin("run-2", 2000.0)
    made.add(60.0, 5.0)
    made.add(60.0, 6.0)
    assert made.energy == Energy(2000.0, 60.0)
    assert EnergyMeter().energy is None


def test_an_agent_that_is_restarted_goes_on_and_counts_its_absence_as_a_gap(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run-1")
    paths.directory.mkdir()
    own = {"energy_joules": 720.0, "energy_since_at": 1000.0, "energy_gap_seconds": 2.0}
    kept = msgspec.structs.replace(reading(5000.0), **own)
    other = msgspec.structs.replace(reading(5001.0), node="b", energy_joules=1.0, energy_since_at=1.0)
    with RunDb(paths) as recorder:
        recorder.host(kept)
        recorder.host(other)
    with HostReader("a", tmp_path, devices=()) as reader:
        assert reader.read(5009.0).energy_since_at is None  # no run yet
        reader.count_for("run-1", 5010.0, paths)
        again = reader.read(5010.0)
    assert (again.energy_joules, again.energy_since_at) == (720.0, 1000.0)
    assert again.energy_gap_seconds >= 12.0
    with HostReader("a", tmp_path, devices=()) as reader:
        reader.count_for("run-1", 9000.0, paths)  # taken up again much later
        later = reader.read(9000.0)
    assert (later.energy_joules, later.energy_since_at) == (None, 9000.0)
