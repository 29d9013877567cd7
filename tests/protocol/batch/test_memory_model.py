"""Peak memory by micro-batch: the line through what was measured, and the largest that fits."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.batch.memory_estimate import MemoryModel, fit

MB = 10**6


@given(st.floats(0, 1e11), st.floats(1, 1e9), st.floats(0, 2e11), st.integers(1, 512))
def test_the_largest_that_fits_is_the_last_one(base: float, sample: float, limit: float, largest: int) -> None:
    model = MemoryModel(base, sample)
    most = model.most(limit, largest)
    assert 0 <= most <= largest
    assert most == 0 or model.peak(most) <= limit * (1 + 1e-9)
    assert most == largest or model.peak(most + 1) > limit * (1 - 1e-9)


def test_the_line_goes_through_most_peaks_and_odd_ones_don_t_move_it() -> None:
    chance = random.Random(2)
    peaks = [(micro, (400 + 17 * micro) * MB * chance.uniform(0.99, 1.01)) for micro in (1, 2, 4, 8, 16, 32)]
    peaks[1] = (2, 900.0 * MB)
    model = fit(peaks)
    assert model.sample_bytes == pytest.approx(17 * MB, rel=0.1)
    assert model.peak(24) == pytest.approx((400 + 17 * 24) * MB, rel=0.03)
    # A later peak moves the line and keeps its slope.
    moved = MemoryModel(400.0, 10.0).through(8, 600.0)
    assert (moved.peak(8), moved.peak(9)) == (600.0, 610.0)


def test_peaks_that_tell_nothing_of_a_sample_make_no_model() -> None:
    for peaks in ([], [(4, 1.0)], [(4, 1.0), (5, 2.0)], [(4, 5.0), (8, 5.0)], [(4, 5.0), (8, 4.0)]):
        assert fit(peaks) is None
