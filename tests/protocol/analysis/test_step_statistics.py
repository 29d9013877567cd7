"""Statistics of steps and durations: by the standard library over the same values; slowdowns found, none invented."""

import math
import random
import statistics

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.support import planted_curves as planted
from tests.tiers import scale
from tools.protocol_docs import examples

from trainctl.protocol.analysis.detectors import robust_trend
from trainctl.protocol.analysis.rolling import (
    LEARNED_STEPS,
    MAD_SCALE,
    RECENT_STEPS,
    STATISTICS_STEPS,
    RollingStatistics,
    SlowdownDetector,
    StepStatistics,
)

EXAMPLE = examples.EXAMPLES["published by an agent"]["step-committed"]
CURVE = planted.healthy(0, 2 * STATISTICS_STEPS)
STEPS = [
    msgspec.structs.replace(EXAMPLE, step=number, loss=loss, grad_norm=norm, values={"clip_scale": 0.5})
    for number, (loss, norm) in enumerate(CURVE, 1)
]
NAMES = {"loss_std", "loss_trend", "loss_z", "grad_norm_trend", "recent_skipped_steps"}


def test_the_metrics_are_those_of_the_newest_steps() -> None:
    rolling = StepStatistics()
    found = [rolling.joined(step).values for step in STEPS]
    full = STATISTICS_STEPS - 1
    assert [values.keys() & NAMES for values in found[:full]] == [set()] * full
    assert found[full].keys() & NAMES == NAMES - {"loss_z"}
    losses, norms = zip(*CURVE[-STATISTICS_STEPS:], strict=True)
    assert found[-1].keys() == NAMES | {"clip_scale"}
    assert found[-1]["loss_std"] == pytest.approx(statistics.stdev(losses))
    for name, values in (("loss_trend", losses), ("grad_norm_trend", norms)):
        assert found[-1][name] == pytest.approx(statistics.linear_regression(range(len(values)), values).slope)
    before = sorted(loss for loss, _ in CURVE[-STATISTICS_STEPS - 1 : -1])
    middle = statistics.median(before)
    mad = statistics.median(abs(loss - middle) for loss in before)
    assert found[-1]["loss_z"] == pytest.approx((CURVE[-1][0] - middle) / (1.4826 * mad))
    # Skipped steps are counted.
    rolling = StepStatistics()
    rows = [msgspec.structs.replace(step, skipped="nan" if step.step % 40 == 0 else None) for step in STEPS]
    found = [rolling.joined(row).values.get("recent_skipped_steps") for row in rows]
    assert found[STATISTICS_STEPS - 1 : STATISTICS_STEPS + 21] == [2.0] * 20 + [3.0] * 2


def test_a_restart_changes_nothing_and_a_step_made_again_only_lacks_the_oldest_step() -> None:
    whole, again = StepStatistics(), StepStatistics(STEPS[50:150])
    found = [whole.joined(step) for step in STEPS]
    assert [again.joined(step) for step in STEPS[150:]] == found[150:]
    made_again = {name: value for name, value in found[-1].values.items() if name != "loss_z"}
    assert whole.joined(STEPS[-1]).values == made_again  # 99 of the 100 steps before are known
    own = msgspec.structs.replace(STEPS[-1], values={"loss_std": 3.0})
    assert StepStatistics(STEPS[:-1]).joined(own).values["loss_std"] == 3.0, "a program's own value stays"


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


SEEDS = scale("slowdowns")
DURATIONS = 100_000 if SEEDS >= 100 else 5_000
NOISE = 0.02


def noisy(chance: random.Random, level: float = 1.0, noise: float = NOISE) -> float:
    return max(level * (1 + chance.gauss(0, noise)), 1e-6)


def test_slowdowns_of_a_tenth_are_found_at_two_percent_noise() -> None:
    def is_found(seed: int) -> bool:
        chance, detector = random.Random(seed), SlowdownDetector()
        if any(detector.add(noisy(chance)) for _ in range(LEARNED_STEPS + chance.randrange(500))):
            return False
        return any(detector.add(noisy(chance, 1.1)) for _ in range(59))

    assert sum(map(is_found, range(4 * SEEDS))) >= 0.99 * 4 * SEEDS


@pytest.mark.parametrize(("noise", "outliers"), [(0.02, 0.0), (0.05, 0.0), (0.1, 0.0), (0.02, 0.02)])
def test_there_is_no_false_alarm(noise: float, outliers: float) -> None:
    chance, detector = random.Random(f"{noise} {outliers}"), SlowdownDetector()
    alarms = 0
    for _ in range(DURATIONS):
        long = 5.0 if chance.random() < outliers else 1.0
        alarms += detector.add(long * noisy(chance, noise=noise))
    assert alarms == 0


def test_it_is_over_once_the_durations_are_as_before() -> None:
    chance, detector = random.Random(1), SlowdownDetector()
    for level, is_slow in ((1.0, False), (1.3, True), (1.0, False), (1.3, True)):
        for _ in range(2 * LEARNED_STEPS):
            detector.add(noisy(chance, level))
        assert detector.is_slow is is_slow
    assert detector.slowdown == pytest.approx(0.3, abs=0.02)


def test_a_rank_that_gets_faster_is_compared_with_what_it_then_is() -> None:
    chance, detector = random.Random(2), SlowdownDetector()
    for level in (2.0, 1.0):
        for _ in range(200):
            assert not detector.add(noisy(chance, level))
    assert detector.level == pytest.approx(1.0, rel=0.02)
    detector = SlowdownDetector()
    for step in range(2000):  # a few long steps are no slowdown
        assert not detector.add(noisy(chance, 40.0 if step % 100 < 4 else 1.0))


def test_a_detector_that_continues_from_a_level_finds_what_had_begun_before() -> None:
    chance, detector = random.Random(4), SlowdownDetector(1.0)
    found = [detector.add(noisy(chance, 1.25)) for _ in range(RECENT_STEPS)]
    assert found[-1] and not any(found[:-1])


@given(st.lists(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), max_size=200))
def test_any_values_can_be_given(values: list[float | None]) -> None:
    detector = SlowdownDetector()
    for value in values:
        detector.add(value)
    assert detector.level is None or detector.level > 0


@given(st.floats(1e-6, 1e6), st.integers(0, 1000))
def test_the_unit_of_the_durations_does_not_matter(unit: float, seed: int) -> None:
    chance, one, other = random.Random(seed), SlowdownDetector(), SlowdownDetector()
    values = [noisy(chance, 1.0 if step < 80 else 1.2) for step in range(120)]
    assert [one.add(value) for value in values] == [other.add(unit * value) for value in values]
