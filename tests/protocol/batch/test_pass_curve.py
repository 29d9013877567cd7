"""Seconds of a pass by micro-batch: as measured at the points, never less for more samples, and smooth under noise."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.errors import InvalidInputError

SIZES = (1, 2, 4, 8, 16, 32, 64)
tables = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 100), min_size=1, max_size=9)


@given(tables, st.integers(1, 400))
def test_more_samples_never_take_less(table: dict[int, float], size: int) -> None:
    curve = PassCurve(tuple(table.items()))
    assert curve.seconds(size) <= curve.seconds(size + 1) * (1 + 1e-9)
    assert curve.most(curve.seconds(size)) >= size
    assert curve.seconds(curve.most(curve.seconds(size))) <= curve.seconds(size) * (1 + 1e-6)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8))
def test_rising_points_are_kept(steps: list[float]) -> None:
    points = [(2**index, sum(steps[: index + 1])) for index in range(len(steps))]
    curve = PassCurve(tuple(points))
    assert [curve.seconds(size) for size, _ in points] == pytest.approx([seconds for _, seconds in points])


def test_falling_neighbours_get_their_mean_and_seconds_lie_on_lines_between_points_and_beyond_them() -> None:
    curve = PassCurve(((4, 2.0), (1, 1.0), (8, 1.0), (16, 3.0)))
    assert curve.points == ((1, 1.0), (4, 1.5), (8, 1.5), (16, 3.0))
    curve = PassCurve(((2, 1.0), (4, 1.5), (8, 3.5)))
    assert [curve.seconds(size) for size in (0, 1, 3, 6, 10)] == pytest.approx([0.0, 0.75, 1.25, 2.5, 4.5])
    alone = PassCurve(((4, 2.0),))
    assert [alone.seconds(size) for size in (1, 4, 12)] == pytest.approx([0.5, 2.0, 6.0])
    assert [curve.most(seconds) for seconds in (0.5, 0.75, 1.49, 4.5)] == [0, 1, 3, 10]
    for points in ((), ((1, 0.0),), ((0, 1.0),)):
        with pytest.raises(InvalidInputError, match="at least one micro-batch with positive seconds"):
            PassCurve(points)


def test_the_peaks_of_two_chips_are_found() -> None:
    """Samples per second of one that needs large passes, and of one that is fastest at 4."""
    rates = {1: 200, 8: 450, 16: 620, 32: 776, 64: 750}, {1: 180, 4: 278, 8: 265, 16: 240, 32: 210}
    large, small = (PassCurve(tuple((size, size / rate) for size, rate in chip.items())) for chip in rates)
    assert (large.peak(), small.peak()) == (32, 4)
    assert (large.peak(24), small.peak(3)) == (24, 3)
    assert small.samples_per_second(4) == pytest.approx(278)


def test_noise_is_averaged_out_where_the_curve_is_straight() -> None:
    """A pass costs 0.1 s and a sample 0.02 s; every point is measured with 2 % noise."""
    ragged, smooth = [], []
    for seed in range(200):
        chance = random.Random(seed)
        points = [(size, (0.1 + 0.02 * size) * chance.lognormvariate(0, 0.02)) for size in SIZES]
        for curve, errors in ((PassCurve(tuple(points)), ragged), (PassCurve.smoothed(points, 0.02), smooth)):
            errors += [abs(curve.seconds(size) / (0.1 + 0.02 * size) - 1) for size in SIZES]
    assert statistics.mean(smooth) < 0.7 * statistics.mean(ragged)


def test_a_bend_larger_than_the_noise_stays() -> None:
    """The rate falls by a tenth with each doubling beyond 8."""
    points = [(size, size / min(10 * size, 80 * 0.9 ** max(SIZES.index(size) - 3, 0))) for size in SIZES]
    curve = PassCurve.smoothed(points, 0.02)
    assert curve.peak() == 8
    assert curve.seconds(64) == pytest.approx(points[-1][1], rel=0.03)
    assert PassCurve.smoothed(points, 0.0) == PassCurve(tuple(points))
