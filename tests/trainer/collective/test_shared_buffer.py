"""What lies in the shared buffer comes out of a sum as it went in."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.trainer.collective.channel import Reduce
from trainctl.trainer.collective.reducer import Reducer
from trainctl.trainer.collective.shared_buffer import Layout, SharedBuffer, read_tail, tail_words, write_tail

FINITE = st.floats(min_value=-3e38, max_value=3e38).filter(lambda value: value == 0 or abs(value) > 1e-20)


@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=2, max_size=16))
def test_every_rank_reads_every_ranks_doubles(ranks: list[tuple[float, float, float]]) -> None:
    total = np.zeros(tail_words(len(ranks), 3), np.float32)
    for index, values in enumerate(ranks):
        tail = np.full_like(total, 9.0)
        write_tail(tail, index, values)
        total += tail
    assert read_tail(total, 3) == [list(values) for values in ranks]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_bad_number_stays_in_its_slot_and_stays_bad(bad: float) -> None:
    tail = np.zeros(tail_words(2, 2), np.float32)
    write_tail(tail, 1, (bad, 3.0))
    found = read_tail(tail, 2)
    assert found[0] == [0.0, 0.0]
    assert not math.isfinite(found[1][0])
    assert found[1][1] == 3.0


def test_parameters_lie_in_order_of_name_without_gaps() -> None:
    layout = Layout({"a": (2, 3), "b": (), "c": (4,)}, "digest")
    buffer = SharedBuffer.create(layout.elements)
    views = layout.views(buffer.floats)
    for number, name in enumerate(views):
        views[name][...] = number
    assert buffer.floats.tolist() == [0.0] * 6 + [1.0] + [2.0] * 4
    again = SharedBuffer(buffer.descriptor, buffer.size_bytes)
    assert np.array_equal(again.floats, buffer.floats), "both ends see it"
    buffer.close()


def test_a_sum_goes_chunk_by_chunk() -> None:
    """The engine that counts stands for a real one; other tests sum with those."""
    sizes = []

    class Counting:
        def all_reduce(self, words: np.ndarray) -> None:
            sizes.append((words.dtype.name, len(words)))
            words += 1

    reducer = Reducer()
    reducer._buffer, reducer._collective, reducer._chunk_words = SharedBuffer.create(100), Counting(), 30
    reducer.carry_out(Reduce("float32", 5, 70), [])
    reducer.carry_out(Reduce("int32", 90, 10), [])
    assert sizes == [("float32", 30), ("float32", 30), ("float32", 10), ("int32", 10)]
    assert reducer._buffer.floats[:90].tolist() == [0.0] * 5 + [1.0] * 70 + [0.0] * 15
    assert reducer._buffer.integers[90:].tolist() == [1] * 10
    reducer._buffer.close()
