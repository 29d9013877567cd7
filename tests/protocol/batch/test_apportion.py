"""Whole samples by weights and by speed: exact sums, and no better split than the one that is found."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.batch.apportion import Speed, Timing, apportion, quickest, speeds, spread
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Phases

WEIGHTS = st.dictionaries(st.integers(0, 15), st.floats(0, 1e6), min_size=1, max_size=16)


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (16, {0: 14, 1: 2}, {0: 14, 1: 2}),  # what divides without a rest is dealt just so
        (32, {0: 14, 1: 2}, {0: 28, 1: 4}),
        (8, {0: 1, 1: 1, 2: 1}, {0: 3, 1: 3, 2: 2}),  # ties to the lower rank
        (10, {0: 0.1, 1: 0.2, 2: 0.7}, {0: 1, 1: 2, 2: 7}),
        (16, {0: 1000, 1: 1, 2: 1}, {0: 14, 1: 1, 2: 1}),  # no rank is left without
        (3, {0: 0, 1: 0, 2: 5}, {0: 1, 1: 1, 2: 1}),
    ],
)
def test_samples_are_dealt_in_proportion(total: int, weights: dict[int, float], counts: dict[int, int]) -> None:
    assert apportion(total, weights) == counts


@given(WEIGHTS, st.integers(0, 10_000))
def test_shares_sum_to_the_batch_and_leave_no_rank_out(weights: dict[int, float], spare: int) -> None:
    if not any(weights.values()):
        return
    total = len(weights) + spare
    counts = apportion(total, weights)
    assert counts.keys() == weights.keys()
    assert sum(counts.values()) == total
    assert min(counts.values()) >= 1
    heavier = sorted(weights, key=lambda rank: (weights[rank], -rank))
    assert all(counts[a] <= counts[b] for a, b in itertools.pairwise(heavier) if weights[a] < weights[b])


@given(WEIGHTS, st.integers(0, 10_000))
def test_what_is_spread_is_within_one_of_its_proportion(weights: dict[int, float], total: int) -> None:
    whole = sum(weights.values())
    if not whole:
        return
    counts = spread(total, weights)
    assert sum(counts.values()) == total
    assert all(abs(counts[rank] - total * weights[rank] / whole) < 1 + 1e-6 * total for rank in weights)


@pytest.mark.parametrize("weights", [{}, {0: 0.0}, {0: -1.0, 1: 2.0}, {0: float("nan")}, {0: float("inf")}])
def test_weights_without_a_proportion_are_refused(weights: dict[int, float]) -> None:
    with pytest.raises(InvalidInputError, match="positive weight"):
        apportion(8, weights)


def test_more_ranks_than_samples_are_refused_by_the_field() -> None:
    with pytest.raises(InvalidInputError, match="shares: 2 samples are too few for 3 ranks"):
        apportion(2, {0: 1, 1: 1, 2: 1}, "shares")


@given(st.lists(st.integers(1, 500), min_size=1, max_size=16))
def test_what_is_a_split_already_stays_one(counts: list[int]) -> None:
    assert [*apportion(sum(counts), dict(enumerate(map(float, counts)))).values()] == counts


# ---------------------------------------------------------------- by speed

SPEEDS = st.dictionaries(
    st.integers(0, 3), st.builds(Speed, st.floats(0.1, 100), st.floats(0, 5)), min_size=1, max_size=4
)


def slowest(counts: dict[int, int], by_rank: dict[int, Speed]) -> float:
    return max(by_rank[rank].seconds(count) for rank, count in counts.items())


@given(SPEEDS, st.integers(0, 8))
def test_no_other_split_is_quicker(by_rank: dict[int, Speed], spare: int) -> None:
    total = len(by_rank) + spare
    counts = quickest(total, by_rank)
    assert counts.keys() == by_rank.keys()
    assert sum(counts.values()) == total
    assert min(counts.values()) >= 1
    every = itertools.product(range(1, total + 1), repeat=len(by_rank))
    best = min(slowest(dict(zip(counts, each, strict=True)), by_rank) for each in every if sum(each) == total)
    assert slowest(counts, by_rank) <= best * (1 + 1e-9)


@pytest.mark.parametrize(
    ("total", "by_rank", "counts"),
    [
        (24, {0: (3, 0), 1: (1, 0)}, {0: 18, 1: 6}),  # no floors: by rates
        (24, {0: (3, 1), 1: (1, 1)}, {0: 18, 1: 6}),  # the same floor for all changes nothing
        (48, {0: (60, 0.02), 1: (12, 0.2)}, {0: 42, 1: 6}),  # a floor is time that its rank has less
        (8, {0: (1, 0), 1: (1, 100)}, {0: 7, 1: 1}),  # no rank is left without
    ],
)
def test_a_floor_is_paid_for_with_samples(
    total: int, by_rank: dict[int, tuple[float, float]], counts: dict[int, int]
) -> None:
    assert quickest(total, {rank: Speed(*speed) for rank, speed in by_rank.items()}) == counts


def test_shares_by_speed_need_ranks_that_have_one() -> None:
    with pytest.raises(InvalidInputError, match="auto: every rank needs a measured rate above 0"):
        quickest(8, {0: Speed(1.0), 1: Speed(0.0)}, "auto")
    with pytest.raises(InvalidInputError, match="auto: 1 samples are too few for 2 ranks"):
        quickest(1, {0: Speed(1.0), 1: Speed(1.0)}, "auto")


def test_a_speed_is_the_median_of_steps_and_its_floor_has_no_wait_for_others() -> None:
    """The quick rank spends 0.5 s in sync, all but the transfer's 0.1 s waiting for the slow one."""
    quick = Phases(data=0.1, forward=0.1, backward=0.2, sync=0.5, optimizer=0.02, wait=0.01)
    slow = Phases(data=0.1, forward=0.3, backward=0.4, sync=0.1, optimizer=0.2, wait=0.03)
    odd = Phases(data=9.0, sync=9.0, optimizer=9.0, wait=9.0)
    found = speeds({0: [Timing(8, quick), Timing(8, quick), Timing(8, odd)], 1: [Timing(4, slow)] * 3, 2: []})
    assert found.keys() == {0, 1}
    assert found[0] == pytest.approx((8 / 0.4, 0.1 + 0.01 + 0.02))
    assert found[1] == pytest.approx((4 / 0.8, 0.1 + 0.01 + 0.2))
    assert speeds({}) == {}
    assert speeds({0: [Timing(0, Phases(sync=1.0))]}) == {}, "nothing computed, no speed"
