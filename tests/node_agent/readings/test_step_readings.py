"""Readings of machines by step: each with the step that was made when it came, by node and by a rank's device."""

import pickle

import msgspec
import pytest
from tests.node_agent.support.records import part, reading

from trainctl.node_agent.readings.step_readings import StepReadings
from trainctl.protocol import messages as m


def read(node: str, at: float, percent: float | None, *gpus: float) -> m.HostReading:
    devices = tuple(m.GpuReading("H200", utilization_percent=used) for used in gpus)
    return msgspec.structs.replace(reading(at), node=node, cpu_percent=percent, gpus=devices, values={"user:fans": at})


def percent(joined: m.RankStep) -> float | None:
    return m.METRICS["cpu_percent"].of(joined)


def test_a_step_has_the_mean_of_what_came_while_it_was_made() -> None:
    readings = StepReadings()
    for at, used in ((1.0, 10.0), (2.0, 30.0), (2.0, 30.0), (3.0, None)):
        readings.take(read("node-0", at, used), 5)
    readings.take(read("node-1", 1.5, 90.0), 5)
    joined = readings.joined(part(5), None)
    assert percent(joined) == 20.0, "the newest came twice, and one without a value says nothing"
    assert joined.values.items() >= part(5).values.items()
    assert percent(readings.joined(part(5, rank=1), None)) == 90.0
    assert readings.joined(part(6), None) == part(6), "none came while it was made"


def test_late_parts_find_theirs_and_old_or_retracted_steps_are_forgotten() -> None:
    readings = StepReadings()
    for number in range(1, 6):
        readings.take(read("node-0", float(number), 10.0 * number), number)
    assert percent(readings.joined(part(3), None)) == 30.0
    assert percent(readings.joined(part(2), None)) is None
    readings.take(read("node-0", 9.0, 90.0), 4)  # a redo of what was retracted
    assert percent(readings.joined(part(5), None)) is None


@pytest.mark.parametrize(
    ("device", "used"), [("cuda:1 NVIDIA H200", 60.0), ("cuda:0", 40.0), ("cpu", None), (None, 40)]
)
def test_a_rank_has_what_is_read_of_its_own_device(device: str | None, used: float | None) -> None:
    readings = StepReadings()
    readings.take(read("node-0", 1.0, 10.0, 40.0, 60.0), 1)
    joined = readings.joined(part(1), device)
    assert m.METRICS["gpu_utilization_percent"].of(joined) == used
    assert "user:fans" not in joined.values, "only metrics of the table are kept by step"


def test_a_step_that_does_not_end_takes_no_more_memory() -> None:
    readings, held = StepReadings(), []
    for at in range(1, 3_001):
        readings.take(read("node-0", float(at), at % 5 * 10.0, 40.0, at % 2 * 50.0), 7)
        if at in (1_000, 3_000):
            held.append(len(pickle.dumps(readings)))
    assert held[0] == pytest.approx(held[1], abs=2_000), "2,000 readings more are kept"
    joined = readings.joined(part(7), "cuda:1")
    assert (percent(joined), m.METRICS["gpu_utilization_percent"].of(joined)) == (20.0, 25.0)
