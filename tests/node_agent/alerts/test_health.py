"""Alerts on a run's health: what raises each, what it says, and what leaves it alone."""

import math
import random
from collections.abc import Sequence

import pytest
from tests.node_agent.support.alert_world import GENERATION, NODES, RUN, World
from tests.protocol.support import planted_curves as planted
from tests.protocol.support.planted_curves import CURVES

from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

GB = 10**9
CALM = AlertsTable(clear_seconds=5.0, off=("stall", "device-idle"))


class HealthWorld(World):
    """With steps and parts whose health figures the test gives."""

    def curve(self, curve: Sequence[tuple[float, float]]) -> None:
        for loss, norm in curve:
            self.step(loss, grad_norm=norm)

    def clipped(self, scale: float) -> None:
        self.now += 1.0
        self.step_number += 1
        self.evaluator.heard(
            m.StepCommitted(
                run=RUN, generation=GENERATION, step=self.step_number, committed_at=0, loss=2.0, weight=100, samples=16,
                learning_rate=1e-3, grad_norm=1.0, cursor=0, global_batch=16, plan_version=1, step_seconds=1.0,
                tokens_total=0, values={"clip_scale": scale},
            ),
            self.now,
        )  # fmt: skip
        self.look()

    def rank_part(self, *, data: float = 0.01, seconds: float = 1.0, used: float | None = None) -> None:
        self.now += 1.0
        self.step_number += 1
        values = {} if used is None else {"memory_peak_bytes": used, "memory_cap_bytes": 10.0 * GB}
        part = m.RankStep(
            run=RUN, generation=GENERATION, step=self.step_number, rank=1, node=NODES[1], tokens=1000, samples=8,
            micro_batch=4, replays=0, step_seconds=seconds, phases=m.Phases(data=data, forward=0.3, backward=0.5),
            values=values,
        )  # fmt: skip
        self.evaluator.heard(part, self.now)
        self.look()

    def busy(self, percent: float, seconds: int) -> None:
        for _ in range(seconds):
            self.reading(percent=percent)


def test_a_loss_that_diverges_is_told_once_with_its_best_level() -> None:
    world = HealthWorld(CALM)
    world.curve(planted.diverged(1))
    assert world.told.count("raised divergence") == 1
    assert world.told.count("cleared divergence") == 0
    assert "the loss rises: level" in world.text("divergence")
    assert "lower the learning rate" in world.facts("divergence")[0]


def test_a_new_agent_knows_the_best_level_of_the_record() -> None:
    """Its own steps alone only fall."""
    curve = planted.diverged(1)
    steps = [
        m.StepCommitted(
            run=RUN, generation=GENERATION, step=number, committed_at=0, loss=loss, weight=100, samples=16,
            learning_rate=1e-3, grad_norm=norm, cursor=0, global_batch=16, plan_version=1, step_seconds=1.0,
            tokens_total=0,
        )
        for number, (loss, norm) in enumerate(curve, 1)
    ]  # fmt: skip
    world = HealthWorld(CALM)
    world.evaluator.replay(steps[200:-1])
    world.step_number = len(steps) - 1
    world.step(curve[-1][0])
    assert world.told == ["raised divergence"]


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_curve_raises_nothing(seed: int) -> None:
    world = HealthWorld(CALM)
    world.curve(planted.healthy(seed, 400))
    assert world.told == []


def test_clipping_that_leaves_almost_nothing_is_told_after_a_hundred_steps() -> None:
    world = HealthWorld(CALM)
    for number in range(99):
        world.clipped(0.001 if number % 4 else 1.0)
    assert world.told == []
    world.clipped(0.001)
    assert world.told == ["raised clip"]
    assert "median clip scale 0.001" in world.text("clip")
    for _ in range(99):
        world.clipped(0.5)
    assert world.told == ["raised clip", "cleared clip"]


@pytest.mark.parametrize(("data", "seconds", "told"), [
    (0.08, 1.0, ["raised data-wait:mbp:1"]), (0.04, 1.0, []), (0.015, 0.05, []),
])  # fmt: skip
def test_waits_for_data_are_told_above_a_part_of_the_step_and_an_absolute_time(
    data: float, seconds: float, told: list[str]
) -> None:
    world = HealthWorld(CALM)
    for _ in range(160):
        world.rank_part(data=data, seconds=seconds)
    assert world.told == told


def test_memory_that_grows_to_its_cap_within_the_run_is_told() -> None:
    """The run has 10,000 steps."""
    draw, world = random.Random(3), HealthWorld(CALM)
    for number in range(300):
        world.rank_part(used=4 * GB + 2e6 * number + draw.gauss(0, 5e6))
    assert world.told == ["raised memory-rise:mbp:1"]
    assert "2 MB per step" in world.text("memory-rise:mbp:1")
    assert "of 10,000" in world.text("memory-rise:mbp:1")


@pytest.mark.parametrize("kind", ["jump", "noise", "slow", "sawtooth"])
def test_memory_that_does_not_keep_growing_is_left_alone(kind: str) -> None:
    draw, world = random.Random(4), HealthWorld(CALM)
    made = {
        "jump": lambda step: 4 * GB + (2 * GB if step > 150 else 0),
        "noise": lambda step: 4 * GB + draw.gauss(0, 0.5 * GB),
        "slow": lambda step: 4 * GB + 1e4 * step,
        "sawtooth": lambda step: 4 * GB + 1e7 * (step % 50),
    }[kind]
    for number in range(600):
        world.rank_part(used=made(number))
    assert world.told == []


def test_an_idle_device_is_told_with_its_reason_where_it_is_watched() -> None:
    world, silent = HealthWorld(AlertsTable(clear_seconds=5.0, off=("stall",))), HealthWorld(CALM)
    for each in (world, silent):
        for _ in range(100):
            each.rank_part(data=0.03)
        each.busy(60.0, 130)
    assert world.told == ["raised device-idle:mbp:1"]
    assert silent.told == []
    text = world.text("device-idle:mbp:1")
    assert text == "device busy 60 % of the time: it waits for the next operation within passes"
    world.busy(99.0, 80)
    assert world.told[-1] == "cleared device-idle:mbp:1"


@pytest.mark.parametrize(
    "limits, words",
    [(("thermal",), "limited by heat"), (("power",), "limited by its power cap"), ((), "waits for data")],
)
def test_an_idle_device_says_first_what_lowers_its_clock(limits: tuple[m.ClockLimit, ...], words: str) -> None:
    world = HealthWorld(AlertsTable(clear_seconds=5.0, off=("stall", "data-wait")))
    for _ in range(120):
        world.rank_part(data=0.2)
    for _ in range(130):
        world.reading(percent=60.0, limits=limits)
    assert words in world.text("device-idle:mbp:1")


def test_a_lower_clock_says_what_lowers_it() -> None:
    world = HealthWorld(CALM)
    for mhz in [1620.0] * 130 + [1200.0] * 40:
        world.reading(mhz=mhz, limits=("thermal",) if mhz < 1600 else ())
    assert world.text("clock:mbp:1").endswith("GHz, limited by heat")


def test_values_that_are_missing_raise_nothing() -> None:
    world = HealthWorld(CALM)
    for _ in range(250):
        world.rank_part(data=math.nan)
    assert world.told == []


def test_recorded_healthy_runs_raise_nothing() -> None:
    """20 runs of real models, all as one evaluator sees them."""
    for curve in CURVES.tolist():
        world = HealthWorld(CALM)
        world.curve(curve)
        assert world.told == []
