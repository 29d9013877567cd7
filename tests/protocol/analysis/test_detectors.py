"""Detectors on planted curves and on 20 recorded ones of real models: each fault is found soon, and nothing else."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from tests.protocol.support import planted_curves as planted
from tests.protocol.support.planted_curves import CURVES, FAULT_STEP, Curve
from tests.tiers import scale

from trainctl.protocol.analysis.detectors import (
    Divergence,
    DivergenceDetector,
    Plateau,
    PlateauDetector,
    Spike,
    SpikeDetector,
)

SEEDS = range(scale("healthy curves"))


def spikes(curve: Curve, detector: SpikeDetector | None = None, first: int = 1) -> Iterator[tuple[int, Spike]]:
    detector = detector or SpikeDetector()
    for step, (loss, norm) in enumerate(curve[first - 1 :], first):
        if (found := detector.add(step, loss, norm)) is not None:
            yield step, found


def divergences(curve: Curve, detector: DivergenceDetector | None = None) -> Iterator[tuple[int, Divergence]]:
    detector = detector or DivergenceDetector()
    for step, (loss, _) in enumerate(curve, 1):
        if (found := detector.add(step, loss)) is not None:
            yield step, found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spike_comes_back_or_is_stuck_until_its_level_is_learned(seed: int) -> None:
    found = [*spikes(planted.spiked(seed, back_after=40))]
    step, spike = found[0]
    assert (step, spike.first, spike.steps) == (FAULT_STEP + 2, FAULT_STEP, 3)
    assert spike.loss > 1.5 * spike.expected
    assert found[-1][0] < FAULT_STEP + 50
    assert not any(spike.is_stuck for _, spike in found)
    found = [*spikes(planted.spiked(seed, back_after=None))]
    stuck = [step for step, spike in found if spike.is_stuck]
    assert found[0][0] == FAULT_STEP + 2
    assert stuck == [*range(FAULT_STEP + 50, FAULT_STEP + 79)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rising_loss_is_found_while_it_rises_and_a_healthy_curve_has_no_fault(seed: int) -> None:
    assert [*spikes(planted.healthy(seed))] == [*divergences(planted.healthy(seed))] == []
    found = [step for step, _ in divergences(planted.diverged(seed))]
    assert FAULT_STEP + 100 < found[0] < FAULT_STEP + 250
    assert found == [*range(found[0], planted.STEPS + 1)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plateau_is_found_at_the_last_of_its_patience(seed: int) -> None:
    detector = PlateauDetector(patience=5)
    evaluations = planted.evaluations(seed, plateau_from=20)
    found = [step for step, loss in evaluations if detector.add(step, loss) is not None]
    assert found == [50 * number for number in range(24, 41)]
    assert detector.state == Plateau(evaluations[18][1], 950, 21, 2000)
    detector.restore(None)
    detector.replay(planted.evaluations(seed, plateau_from=None))
    assert not detector.is_reached


@pytest.mark.parametrize("number", range(20))
def test_a_recorded_run_has_no_fault_but_the_planted_one(number: int) -> None:
    """Loss and norm jump at step 300 and stay; or the loss alone rises by twice its level within 200 steps."""
    curve = CURVES[number].tolist()
    assert [*spikes(curve)] == [*divergences(curve)] == []
    jump, rise = CURVES[number].copy(), CURVES[number].copy()
    jump[FAULT_STEP - 1 :] *= (3, 20)
    rise[FAULT_STEP - 1 :, 0] += CURVES[number, 250:300, 0].mean() * np.arange(1, 202) / 100
    spiked = [*spikes(jump.tolist())]
    assert spiked[0][0] == 302
    assert next(step for step, spike in spiked if spike.is_stuck) == 350
    assert next(step for step, _ in divergences(rise.tolist())) > FAULT_STEP


def test_a_spike_says_whether_the_gradient_norm_jumped_with_the_loss() -> None:
    curve = [(loss, norm) for (loss, _), (_, norm) in zip(planted.spiked(0, None), planted.healthy(0), strict=True)]
    alone = [spike for _, spike in spikes(curve)]
    assert alone[0].first == FAULT_STEP and not any(spike.norm_rose for spike in alone)
    assert all(spike.norm_rose for _, spike in spikes(planted.spiked(0, None)))
    detector = SpikeDetector()
    unknown = [detector.add(step, loss, None) for step, (loss, _) in enumerate(curve, 1)]
    assert [spike.norm_rose for spike in unknown if spike is not None][:1] == [True]
    # Two steps are no spike, and losses that are not finite are none.
    curve = planted.healthy(0)
    for step in (FAULT_STEP, FAULT_STEP + 1):
        curve[step - 1] = 50.0, 500.0
    curve[FAULT_STEP + 1] = math.nan, math.inf
    assert [*spikes(curve)] == []
    assert [*divergences(curve)] == []


def test_a_fault_that_is_rolled_back_is_over() -> None:
    spiked = SpikeDetector()
    before = [*spikes(planted.spiked(0, back_after=None)[: FAULT_STEP + 60], spiked)]
    assert before[-1][1].is_stuck
    assert [*spikes(planted.healthy(0), spiked, first=FAULT_STEP - 50)] == []
    detector = DivergenceDetector()
    assert [*divergences(planted.diverged(0), detector)]
    best = detector.best
    for step, (loss, _) in [*enumerate(planted.healthy(0), 1)][best.step :]:
        assert detector.add(step, loss) is None


def test_an_evaluation_of_the_same_step_is_counted_once_and_one_that_is_not_finite_is_no_improvement() -> None:
    detector = PlateauDetector(patience=2)
    assert detector.add(10, math.nan) is None
    assert detector.state is None
    for step, loss in ((20, 1.0), (30, 0.99995), (30, 0.99995), (30, math.nan)):
        assert detector.add(step, loss) is None
    assert detector.add(40, math.inf) == Plateau(1.0, 20, 2, 40)
    assert detector.add(50, 0.9998) is None
