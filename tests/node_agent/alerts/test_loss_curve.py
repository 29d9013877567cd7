"""Alerts on the loss: values that are no numbers, spikes, divergence and clipping; healthy curves raise nothing."""

import math

import pytest
from tests.node_agent.support.alert_world import GENERATION, RUN, World
from tests.protocol.support import planted_curves as planted
from tests.protocol.support.planted_curves import CURVES

from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

CALM = AlertsTable(clear_seconds=5.0, off=("stall", "device-idle"))


def test_a_loss_that_is_no_number_is_told_at_once_and_is_over_after_twenty_that_are() -> None:
    world, off = World(), World(AlertsTable(off=("nonfinite",)))
    for each in (world, off):
        each.step(math.nan, skipped="nan")
    assert (world.told, off.told) == (["raised nonfinite"], [])
    assert world.text("nonfinite") == "loss is nan at step 1; the step was skipped"
    for _ in range(19):
        world.step()
    assert world.told == ["raised nonfinite"]
    world.step()
    assert world.told == ["raised nonfinite", "cleared nonfinite"]


def test_a_loss_that_is_not_given_raises_nothing_and_those_between_still_do() -> None:
    world = World()
    for number in range(240):
        world.step(None if number % 4 else 2.0 + 0.01 * math.sin(number), grad_norm=None)
    assert world.told == []
    for _ in range(3):
        world.step(None, grad_norm=None)
        world.step(9.0, grad_norm=None)
    assert world.told == ["raised loss-spike"]
    world.step(None, grad_norm=math.nan)
    assert world.told == ["raised loss-spike", "raised nonfinite"]
    assert world.text("nonfinite").startswith("gradient norm is nan")


def test_an_overflow_now_and_then_is_nothing_and_three_are_told() -> None:
    world = World()
    for _ in range(2):
        world.step(skipped="overflow", grad_norm=math.inf)
        world.step()
    assert world.told == []
    world.step(skipped="overflow", grad_norm=math.inf)
    assert world.told == ["raised skipped"]


@pytest.mark.parametrize("slope", [-0.004, 0.0])
def test_a_spike_that_stays_is_told_and_one_that_passes_is_not(slope: float) -> None:
    world = World()

    def steps(count: int, more: float = 0.0) -> None:
        for _ in range(count):
            number = world.step_number
            world.step(3.0 + slope * number + 0.02 * math.sin(7 * number) + more)

    steps(100)
    steps(1, more=2)
    steps(1)
    assert world.told == []
    steps(3, more=2)
    assert world.told == ["raised loss-spike"]
    steps(15)
    assert world.told == ["raised loss-spike", "cleared loss-spike"]


def test_a_loss_that_diverges_is_told_once_also_by_an_agent_that_has_only_read_its_best_level() -> None:
    curve, world, later = planted.diverged(1), World(CALM), World(CALM)
    for loss, norm in curve:
        world.step(loss, grad_norm=norm)
    assert world.told.count("raised divergence") == 1 and "cleared divergence" not in world.told
    assert "the loss rises: level" in world.text("divergence")
    steps = [
        m.StepCommitted(
            run=RUN, generation=GENERATION, step=number, committed_at=0, loss=loss, weight=100, samples=16,
            learning_rate=1e-3, grad_norm=norm, cursor=0, global_batch=16, plan_version=1, step_seconds=1.0,
            tokens_total=0,
        )
        for number, (loss, norm) in enumerate(curve, 1)
    ]  # fmt: skip
    later.evaluator.replay(steps[200:-1])
    later.step_number = len(steps) - 1
    later.step(curve[-1][0])
    assert later.told == ["raised divergence"]


def test_healthy_curves_raise_nothing() -> None:
    """Planted ones, and those of 20 recorded runs of real models."""
    for curve in (*(planted.healthy(seed, 400) for seed in range(2)), *CURVES.tolist()):
        world = World(CALM)
        for loss, norm in curve:
            world.step(loss, grad_norm=norm)
        assert world.told == []


def test_clipping_that_leaves_almost_nothing_is_told_after_a_hundred_steps() -> None:
    world = World(CALM)
    for number in range(99):
        world.step(values={"clip_scale": 0.001 if number % 4 else 1.0})
    assert world.told == []
    world.step(values={"clip_scale": 0.001})
    assert world.told == ["raised clip"]
    assert "median clip scale 0.001" in world.text("clip")
    for _ in range(99):
        world.step(values={"clip_scale": 0.5})
    assert world.told == ["raised clip", "cleared clip"]


def test_a_model_far_from_its_reference_is_told_until_an_evaluation_finds_it_near() -> None:
    world = World(AlertsTable(clear_seconds=5.0, kl_nats=0.3, kl_clear_nats=0.2))
    for kl in (None, 0.25, 0.31, 0.25, math.nan):
        world.kl = kl
        world.look(10.0)
    assert world.told == ["raised kl"]
    assert world.text("kl") == "KL 0.31 nats per token from the reference, above 0.3"
    world.kl = 0.1
    world.look(1.0)
    world.look(10.0)
    assert world.told == ["raised kl", "cleared kl"]
