"""Alerts on a machine and its devices: disk, memory, waits for data, idle devices and lower clocks."""

import math
import random

import pytest
from tests.memory_values import memory
from tests.node_agent.support.alert_world import World

from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

GB = 10**9
CALM = AlertsTable(clear_seconds=5.0, off=("stall", "device-idle"))
WATCHED = AlertsTable(clear_seconds=5.0, off=("stall", "data-wait"))


def read(world: World, count: int, **reading: float | None) -> None:
    for _ in range(count):
        world.reading(**reading)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("free", "total", "raised"),
    [(50e9, 4000e9, True), (100e9, 4000e9, False), (4.2e9, 8e9, True), (50e9, None, False)],
)
def test_a_disk_is_nearly_full_by_its_share_or_by_bytes(free: float, total: float | None, raised: bool) -> None:
    world = World()
    read(world, 4, free=free, total=total)
    assert world.told == (["raised disk:mbp"] if raised else [])
    if raised and total:
        read(world, 40, free=0.029 * total if total > 1e12 else 5.5e9, total=total)  # between the two edges
        assert world.told == ["raised disk:mbp"]
        read(world, 40, free=0.8 * total, total=total)
        assert world.told == ["raised disk:mbp", "cleared disk:mbp"]


def test_the_peak_of_a_step_near_the_cap_is_told_however_little_is_held_after_it() -> None:
    world = World()
    world.steps(1, values=memory(40, 60, 100))
    world.steps(4, values=memory(40, 95, 100))
    assert world.told == ["raised memory:mbp:1"]
    assert "held after the step" in world.facts("memory:mbp:1")[0]
    world.steps(20, values=memory(40, 90, 100))  # between the two edges
    assert world.told == ["raised memory:mbp:1"]
    world.steps(40, values=memory(40, 60, 100))
    assert world.told == ["raised memory:mbp:1", "cleared memory:mbp:1"]


def test_memory_that_grows_to_its_cap_within_the_run_is_told() -> None:
    """The run has 10,000 steps."""
    draw, world = random.Random(3), World(CALM)
    for number in range(300):
        world.steps(1, values=memory(None, 4 * GB + 2e6 * number + draw.gauss(0, 5e6), 10 * GB))
    assert world.told == ["raised memory-rise:mbp:1"]
    text = world.text("memory-rise:mbp:1")
    assert "2 MB per step" in text and "of 10,000" in text


@pytest.mark.parametrize("kind", ["jump", "noise", "slow", "sawtooth"])
def test_memory_that_does_not_keep_growing_is_left_alone(kind: str) -> None:
    draw, world = random.Random(4), World(CALM)
    more = {
        "jump": lambda step: 2 * GB * (step > 150),
        "noise": lambda step: draw.gauss(0, 0.5 * GB),
        "slow": lambda step: 1e4 * step,
        "sawtooth": lambda step: 1e7 * (step % 50),
    }[kind]
    for number in range(600):
        world.steps(1, values=memory(None, 4 * GB + more(number), 10 * GB))
    assert world.told == []


@pytest.mark.parametrize(
    ("data", "seconds", "told"),
    [(0.08, 1.0, ["raised data-wait:mbp:1"]), (0.04, 1.0, []), (0.015, 0.05, []), (math.nan, 1.0, [])],
)
def test_waits_for_data_are_told_above_a_part_of_the_step_and_an_absolute_time(data, seconds, told):
    world = World(CALM)
    world.steps(160, step_seconds=seconds, phases=m.Phases(data=data, forward=0.3, backward=0.5))
    assert world.told == told


@pytest.mark.parametrize(
    ("data", "limits", "words"),
    [
        (0.03, (), "device busy 60 % of the time: it waits for the next operation within passes"),
        (0.2, (), "waits for data"),
        (0.2, ("thermal",), "limited by heat"),
        (0.2, ("power",), "limited by its power cap"),
    ],
)
def test_an_idle_device_is_told_with_its_reason_where_it_is_watched(data, limits, words):
    world, silent = World(WATCHED), World(AlertsTable(off=("stall", "data-wait", "device-idle")))
    for each in (world, silent):
        each.steps(120, phases=m.Phases(data=data, forward=0.3, backward=0.5))
        for _ in range(130):
            each.reading(percent=60.0, limits=limits)
    assert "raised device-idle:mbp:1" in world.told and silent.told == []
    assert words in world.text("device-idle:mbp:1")
    read(world, 80, percent=99.0)
    assert "cleared device-idle:mbp:1" in world.told


def test_a_lower_clock_is_told_with_its_cost_and_its_reason_instead_of_the_slower_rank() -> None:
    world = World()

    def steps(count: int, backward: float = 0.6, limits: tuple[m.ClockLimit, ...] = (), **reading: float) -> None:
        for _ in range(count):
            world.reading(limits=limits, **reading)  # type: ignore[arg-type]
            world.steps(1, backward)

    steps(70)
    steps(60, 0.742, ("thermal",), mhz=1380.0, celsius=84.0)
    assert world.told == ["raised clock:mbp:1"]
    assert world.text("clock:mbp:1") == "+0.14 s in backward: 84 °C, 1.62→1.38 GHz, limited by heat"
    steps(40)
    assert world.told == ["raised clock:mbp:1", "cleared clock:mbp:1"]


def test_a_device_without_work_may_slow_down() -> None:
    world = World()
    read(world, 90)
    read(world, 90, mhz=300.0, percent=5.0)
    assert world.told == []
