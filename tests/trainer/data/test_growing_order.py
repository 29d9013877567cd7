"""Positions of a growing file: every sample once in a pass, and never another one than before."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.trainer.data.growing_dataset import GrowingOrder
from trainctl.trainer.data.permutation import permute, samples_at
from trainctl.trainer.data.sealing import ChunkCutter

COUNTS = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)
SEEDS = st.integers(0, 2**40)


def order_of(counts, seed, *, ended=False):
    order = GrowingOrder(seed)
    for count in counts:
        order = order.sealed(count)
    return order.complete() if ended else order


@given(COUNTS, SEEDS, st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_every_sample_once_in_each_pass_and_in_its_chunk(counts, seed, passes):
    order = order_of(counts, seed, ended=True)
    found = order.at(np.arange(passes * order.samples, dtype=np.int64)).reshape(passes, order.samples)
    for one in found:
        for chunk in range(order.chunks):
            start, stop = order.starts[chunk : chunk + 2]
            assert sorted(one[start:stop]) == list(range(start, stop))


@given(COUNTS, COUNTS, SEEDS)
@settings(max_examples=60, deadline=None)
def test_what_is_sealed_later_changes_no_position(counts, later, seed):
    before, after = order_of(counts, seed), order_of([*counts, *later], seed, ended=True)
    positions = np.arange(before.samples, dtype=np.int64)
    assert np.array_equal(before.at(positions), after.at(positions))


@given(COUNTS, SEEDS, st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_is_what_the_specification_says(counts, seed, position):
    order = order_of(counts, seed, ended=True)
    turn, within = divmod(position, order.samples)
    chunk = next(c for c in range(order.chunks) if order.starts[c] <= within < order.starts[c + 1])
    start, key = order.starts[chunk], turn * 2**32 + chunk
    image = permute(np.array([within - start]), counts[chunk], seed, key)
    assert order.at(np.array([position])).tolist() == (start + image).tolist()


def test_the_first_pass_of_one_chunk_is_that_of_a_file_that_does_not_grow():
    positions = np.arange(30, dtype=np.int64)
    assert np.array_equal(order_of([30], 5).at(positions), samples_at(positions, 30, 5))


def test_a_position_beyond_the_sealed_ones_is_refused_until_the_end():
    order = order_of([4], 0)
    assert order.covers(4) and not order.covers(5)
    with pytest.raises(IndexError, match="position 4 is not in the 4 sealed samples"):
        order.at(np.array([4]))
    assert order.complete().covers(5)
    assert not GrowingOrder(0, ended=True).covers(1)


def test_a_cursor_needs_the_chunks_before_it():
    order = order_of([4, 4, 2], 0, ended=True)
    assert [order.needed(cursor) for cursor in (0, 1, 4, 5, 8, 9, 10, 11)] == [0, 1, 1, 2, 2, 3, 3, 3]


@given(st.binary(max_size=80).map(lambda raw: raw.replace(b"\x00", b"\n")), st.integers(1, 4), st.data())
def test_chunks_depend_on_the_content_and_not_on_how_it_is_read(raw, size, data):
    def cut(pieces):
        cutter = ChunkCutter(Path("x"), size)
        whole = [chunk for piece in pieces for chunk in cutter.feed(piece)]
        return [*whole, *cutter.end()]

    places = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *places], [*places, len(raw)], strict=True)]
    chunks = cut([raw])
    assert cut(pieces) == chunks
    lines = [line for line in raw.split(b"\n") if line.strip()]
    assert [line.rstrip(b"\n") for chunk in chunks for line in chunk.content if line.strip()] == lines
    counts = [sum(bool(line.strip()) for line in chunk.content) for chunk in chunks]
    assert all(count == size for count in counts[:-1]) and all(0 < count <= size for count in counts)
    everything = raw.split(b"\n")
    assert all(everything[chunk.first - 1] + b"\n" == chunk.content[0] for chunk in chunks)
