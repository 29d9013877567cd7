"""Whole samples by weights: exact sums, and none left out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.batch.split import apportion, spread
from trainctl.protocol.errors import InvalidInputError

WEIGHTS = st.dictionaries(st.integers(0, 15), st.floats(0, 1e6), min_size=1, max_size=16)


def test_samples_are_dealt_in_proportion() -> None:
    for total, weights, counts in (
        (32, {0: 14, 1: 2}, {0: 28, 1: 4}),  # what divides without a rest is dealt just so
        (8, {0: 1, 1: 1, 2: 1}, {0: 3, 1: 3, 2: 2}),  # ties to the lower rank
        (10, {0: 0.1, 1: 0.2, 2: 0.7}, {0: 1, 1: 2, 2: 7}),
        (16, {0: 1000, 1: 1, 2: 1}, {0: 14, 1: 1, 2: 1}),  # no rank is left without
        (3, {0: 0, 1: 0, 2: 5}, {0: 1, 1: 1, 2: 1}),
    ):
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


def test_weights_without_a_proportion_and_more_ranks_than_samples_are_refused() -> None:
    refused: tuple[dict[int, float], ...] = ({}, {0: 0.0}, {0: -1.0, 1: 2.0}, {0: float("nan")}, {0: float("inf")})
    for weights in refused:
        with pytest.raises(InvalidInputError, match="positive weight"):
            apportion(8, weights)
    with pytest.raises(InvalidInputError, match="shares: 2 samples are too few for 3 ranks"):
        apportion(2, {0: 1, 1: 1, 2: 1}, "shares")


@given(st.lists(st.integers(1, 500), min_size=1, max_size=16))
def test_what_is_a_split_already_stays_one(counts: list[int]) -> None:
    assert [*apportion(sum(counts), dict(enumerate(map(float, counts)))).values()] == counts
