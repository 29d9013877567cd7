"""The permutation is a bijection and is what its specification says, and batches straddle epochs without loss. Best-fit
decreasing, against the plain algorithm: every sample once, no pack too long, few packs."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainctl.protocol.messages import Range
from trainctl.trainer.data.permutation import best_fit, permute, positions_of, ranges_of, samples_at

GOLDEN = Path(__file__).parents[2] / "golden" / "trainer" / "permutation.json"
MASK = (1 << 64) - 1
G = 0x9E3779B97F4A7C15


def spelled_out(index, size, seed, epoch):
    """The specification in the module's docstring, once more, on Python's own integers."""

    def mix(x):
        x &= MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
        return x ^ (x >> 31)

    base = mix(mix(seed + G) + epoch + G)
    half = max(1, -(-(size - 1).bit_length() // 2))
    while True:
        left, right = index >> half, index & ((1 << half) - 1)
        for turn in range(8):
            left, right = right, left ^ (mix(right ^ mix(base + (turn + 1) * G)) >> (64 - half))
        index = (left << half) | right
        if index < size:
            return index


@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_every_element_once(size, seed, epoch):
    images = permute(np.arange(size, dtype=np.int64), size, seed, epoch)
    assert np.array_equal(np.sort(images), np.arange(size))


@given(st.integers(1, 2**40), st.integers(0, 2**40), st.integers(0, 2**20), st.data())
@settings(max_examples=60, deadline=None)
def test_is_what_the_specification_says(size, seed, epoch, data):
    index = data.draw(st.integers(0, size - 1))
    assert permute(np.array([index]), size, seed, epoch).tolist() == [spelled_out(index, size, seed, epoch)]


def test_golden_vectors():
    vectors = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert len(vectors) >= 8
    for vector in vectors:
        found = permute(np.array(vector["indices"]), vector["size"], vector["seed"], vector["epoch"])
        assert found.tolist() == vector["images"], vector


def test_the_permutation_depends_on_seed_and_epoch_and_mixes():
    indices = np.arange(1000, dtype=np.int64)
    first = permute(indices, 1000, 0, 0)
    for seed, epoch in ((0, 1), (1, 0), (1, 1)):
        assert (permute(indices, 1000, seed, epoch) == first).mean() < 0.02
    assert abs(np.corrcoef(indices, first)[0, 1]) < 0.1


@given(st.integers(1, 200), st.lists(st.integers(1, 90), min_size=1, max_size=40), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_batches_of_any_size_straddle_epochs_without_loss(size, batches, seed):
    cursor, seen = 0, []
    for count in batches:
        seen.extend(samples_at(positions_of([Range(cursor, count)]), size, seed).tolist())
        cursor += count
    for start in range(0, len(seen), size):
        epoch = seen[start : start + size]
        assert len(set(epoch)) == len(epoch)
        if len(epoch) == size:
            assert sorted(epoch) == list(range(size))


@given(st.sets(st.integers(0, 300)))
@settings(deadline=None)
def test_ranges_hold_exactly_their_positions(positions):
    ranges = ranges_of(np.array(sorted(positions, reverse=True), np.int64))
    assert positions_of(ranges).tolist() == sorted(positions)
    assert all(one.stop < other.start for one, other in itertools.pairwise(ranges))


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
