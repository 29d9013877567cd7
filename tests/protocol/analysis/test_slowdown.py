"""Slowdowns in durations with noise: found soon, never invented, and over when they are."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import scale

from trainctl.protocol.analysis.slowdown import LEARNED_STEPS, RECENT_STEPS, SlowdownDetector

SEEDS = scale("slowdowns")
STEPS = 100_000 if SEEDS >= 100 else 5_000
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
    for _ in range(STEPS):
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
