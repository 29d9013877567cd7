"""Rolling statistics, against the standard library's over the same values."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.analysis.rolling import MAD_SCALE, RollingStatistics
from trainctl.protocol.analysis.spikes import robust_trend

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, 2.5, 2.5000001])), min_size=1, max_size=60)
WINDOW = 25


def filled(values: list[float], window: int = WINDOW, gap: int = 1) -> RollingStatistics:
    rolling = RollingStatistics(window)
    for index, value in enumerate(values):
        rolling.add(index * gap + 1, value)
    return rolling


@given(VALUES, st.integers(1, 3))
def test_all_are_those_of_the_newest_values(values: list[float], gap: int) -> None:
    rolling, last = filled(values, gap=gap), values[-WINDOW:]
    size = max(abs(value) for value in last)
    middle = statistics.median(last)
    assert rolling.values == last
    assert rolling.mean == pytest.approx(statistics.fmean(last), rel=1e-12, abs=1e-12 * size)
    assert rolling.median == middle
    assert rolling.mad == statistics.median(abs(value - middle) for value in last)
    if len(last) == 1:
        assert (rolling.std, rolling.trend) == (None, None)
        return
    slope = statistics.linear_regression([gap * index for index in range(len(last))], last).slope
    assert rolling.std == pytest.approx(statistics.stdev(last), rel=1e-9, abs=1e-12 * size)
    assert rolling.trend == pytest.approx(slope, rel=1e-9, abs=1e-12 * size)


@given(VALUES)
def test_steps_made_again_take_the_place_of_the_later_ones(values: list[float]) -> None:
    rolling, kept = filled(values, window=100), values[: len(values) // 2]
    rolling.add(len(kept) + 1, 7.0)
    again = filled([*kept, 7.0], window=100)
    assert (rolling.values, rolling.median, rolling.trend) == (again.values, again.median, again.trend)


def test_values_that_are_not_finite_are_left_out() -> None:
    rolling = filled([1.0, 2.0])
    for value in (None, math.nan, math.inf, -math.inf, 1e300):
        rolling.add(3, value)
    rolling.add(5, 4.0)
    assert rolling.values == [1.0, 2.0, 4.0]
    assert rolling.trend == pytest.approx(statistics.linear_regression([1, 2, 5], [1, 2, 4]).slope)


def test_the_robust_z_is_in_scatters_above_the_median() -> None:
    assert filled([1.0, 2.0, 3.0, 4.0, 100.0]).robust_z(9.0) == pytest.approx(6.0 / MAD_SCALE)
    assert filled([2.0, 2.0, 2.0, 5.0]).robust_z(9.0) is None
    empty = RollingStatistics(5)
    assert (empty.mean, empty.std, empty.median, empty.mad, empty.scatter, empty.trend, empty.robust_z(1.0)) == (
        None,
    ) * 7


def test_a_line_with_outliers_has_the_line_s_trend() -> None:
    values = [3.0 - 0.01 * index + (0.02 if index % 2 else -0.02) for index in range(100)]
    values[40] = values[70] = 50.0
    found = robust_trend(values)
    assert found.slope == pytest.approx(-0.01, abs=1e-3)
    assert found.scatter == pytest.approx(MAD_SCALE * 0.02, rel=0.1)
    assert found.expected == pytest.approx(statistics.median(values[50:]), abs=0.03)
