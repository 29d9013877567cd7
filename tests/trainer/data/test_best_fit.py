"""Best-fit decreasing, against the plain algorithm: every sample once, no pack too long, few packs."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainctl.trainer.data.best_fit import Packs, best_fit

CAPACITY = 24
Lengths = list[int]
some_lengths = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=120)


def packed(lengths: Lengths, seed: int = 0) -> Packs:
    return best_fit(np.array(lengths, np.int64), CAPACITY, seed)


def first_fit(lengths: Lengths) -> int:
    """How many packs the plain first-fit makes, samples as they come."""
    rooms: list[int] = []
    for length in lengths:
        place = next((place for place, room in enumerate(rooms) if room >= length), len(rooms))
        rooms[place : place + 1] = [(rooms[place] if place < len(rooms) else CAPACITY) - length]
    return len(rooms)


def plain_best_fit(lengths: Lengths) -> Lengths:
    """The tokens in each pack, one sample at a time, longest first."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, place) for place, room in enumerate(rooms) if room >= length]
        place = min(fitting)[1] if fitting else len(rooms)
        rooms[place : place + 1] = [(rooms[place] if fitting else CAPACITY) - length]
    return [CAPACITY - room for room in rooms]


@given(some_lengths, st.integers(0, 2**40))
def test_each_sample_is_in_one_pack_and_no_pack_is_too_long(lengths: Lengths, seed: int) -> None:
    packs = packed(lengths, seed)
    sums = packs.sums(np.array(lengths, np.int64))
    assert sorted(packs.members.tolist()) == list(range(len(lengths)))
    assert len(sums) == len(packs) and sums.min() > 0 and sums.max() <= CAPACITY


@given(some_lengths, st.integers(0, 2**40))
@example([24, 12, 12, 8, 8, 8, 8, 5, 5, 5, 5, 5, 1, 1, 1, 1], 0)
def test_packs_are_those_of_the_plain_algorithm(lengths: Lengths, seed: int) -> None:
    sums = packed(lengths, seed).sums(np.array(lengths, np.int64))
    assert sorted(sums.tolist()) == sorted(plain_best_fit(lengths))


@given(some_lengths)
def test_no_two_packs_fit_into_one(lengths: Lengths) -> None:
    sums = packed(lengths).sums(np.array(lengths, np.int64))
    assert len(sums) == 1 or np.partition(sums, 1)[:2].sum() > CAPACITY


def test_there_are_no_more_than_first_fit_makes() -> None:
    for seed in range(20):
        drawn = np.random.default_rng(seed).geometric(0.2, 300)
        lengths = np.minimum(drawn, CAPACITY).tolist()
        assert len(packed(lengths)) <= first_fit(lengths)
        assert len(packed(lengths)) == -(-sum(lengths) // CAPACITY)


@given(some_lengths, st.integers(0, 2**40))
def test_they_depend_on_seed_and_lengths_alone(lengths: Lengths, seed: int) -> None:
    assert packed(lengths, seed).digest == packed(lengths, seed).digest


def test_a_seed_draws_among_samples_of_one_length() -> None:
    lengths = [7, 8, 9] * 40
    assert len({packed(lengths, seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize(("count", "digest"), [(1, "85526ba79728"), (3, "fdde691918c5"), (1000, "c96d6dd92acc")])
def test_golden(count: int, digest: str) -> None:
    """Nodes with other versions of NumPy, or on other systems, make the same packs."""
    lengths = (np.arange(count, dtype=np.int64) * 7919) % CAPACITY + 1
    assert best_fit(lengths, CAPACITY, 3).digest[:12] == digest
