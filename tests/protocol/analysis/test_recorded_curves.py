"""Detectors on 20 healthy runs of real models, recorded once by the trainer itself: no fault."""

import numpy as np
import pytest
from tests.protocol.support.planted_curves import CURVES

from trainctl.protocol.analysis.divergence import DivergenceDetector
from trainctl.protocol.analysis.spikes import SpikeDetector


def test_they_are_twenty_real_curves() -> None:
    """They fall, no two are alike, and their norms are above 0."""
    assert CURVES.shape == (20, 500, 2)
    assert np.isfinite(CURVES).all()
    assert (CURVES[:, -50:, 0].mean(axis=1) < CURVES[:, :50, 0].mean(axis=1)).all()
    assert len({tuple(curve[:, 0]) for curve in CURVES}) == 20
    assert (CURVES[:, :, 1] > 0).all()


@pytest.mark.parametrize("number", range(20))
def test_nothing_is_found(number: int) -> None:
    spikes, divergence = SpikeDetector(), DivergenceDetector()
    for step, (loss, norm) in enumerate(CURVES[number].tolist(), 1):
        assert spikes.add(step, loss, norm) is None, step
        assert divergence.add(step, loss) is None, step


@pytest.mark.parametrize("number", range(20))
def test_a_fault_that_is_planted_in_one_is_found(number: int) -> None:
    """A jump of loss and norm at step 300 that stays; the loss alone that rises by twice its level within 200 steps."""
    level = CURVES[number, 250:300, 0].mean()
    spikes, divergence = SpikeDetector(), DivergenceDetector()
    found = []
    for step, (loss, norm) in enumerate(CURVES[number].tolist(), 1):
        since = max(step - 299, 0)
        found.append((
            spikes.add(step, loss * (3 if since else 1), norm * (20 if since else 1)),
            divergence.add(step, loss + level * since / 100),
        ))  # fmt: skip
    spiked = [step for step, (spike, _) in enumerate(found, 1) if spike is not None]
    stuck = [step for step, (spike, _) in enumerate(found, 1) if spike is not None and spike.is_stuck]
    assert (spiked[0], stuck[0]) == (302, 350)
    assert any(diverged is not None for _, diverged in found)
    assert not any(diverged is not None for _, diverged in found[:300])
