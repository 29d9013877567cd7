"""Best-fit decreasing, against the plain algorithm: every sample once, no pack too long, few packs."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from trainctl.trainer.data.permutation import best_fit

CAPACITY = 24
some_lengths = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=120)


def packed(lengths, seed=0):
    return best_fit(np.array(lengths, np.int64), CAPACITY, seed)


def plain_best_fit(lengths):
    """The tokens in each pack, one sample at a time, longest first."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, place) for place, room in enumerate(rooms) if room >= length]
        place = min(fitting)[1] if fitting else len(rooms)
        rooms[place : place + 1] = [(rooms[place] if fitting else CAPACITY) - length]
    return [CAPACITY - room for room in rooms]


@given(some_lengths, st.integers(0, 2**40))
def test_each_sample_is_in_one_pack_and_no_pack_is_too_long(lengths, seed):
    packs = packed(lengths, seed)
    sums = packs.sums(np.array(lengths, np.int64))
    assert sorted(packs.members.tolist()) == list(range(len(lengths)))
    assert len(sums) == len(packs) and sums.min() > 0 and sums.max() <= CAPACITY


@given(some_lengths, st.integers(0, 2**40))
@example([24, 12, 12, 8, 8, 8, 8, 5, 5, 5, 5, 5, 1, 1, 1, 1], 0)
def test_packs_are_those_of_the_plain_algorithm(lengths, seed):
    sums = packed(lengths, seed).sums(np.array(lengths, np.int64))
    assert sorted(sums.tolist()) == sorted(plain_best_fit(lengths))


def test_a_seed_draws_among_samples_of_one_length():
    lengths = [7, 8, 9] * 40
    assert len({packed(lengths, seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize(("count", "digest"), [(1, "85526ba79728"), (1000, "c96d6dd92acc")])
def test_golden(count, digest):
    """Nodes with other versions of NumPy, or on other systems, make the same packs."""
    lengths = (np.arange(count, dtype=np.int64) * 7919) % CAPACITY + 1
    assert best_fit(lengths, CAPACITY, 3).digest[:12] == digest
