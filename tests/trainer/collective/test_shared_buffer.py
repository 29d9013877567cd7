"""What lies in the shared buffer comes out of a sum as it went in."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.trainer.collective.shared_buffer import read_tail, tail_words, write_tail

FINITE = st.floats(min_value=-3e38, max_value=3e38).filter(lambda value: value == 0 or abs(value) > 1e-20)


@given(st.lists(st.tuples(FINITE, FINITE, FINITE), min_size=2, max_size=16))
def test_every_rank_reads_every_ranks_doubles(ranks):
    total = np.zeros(tail_words(len(ranks), 3), np.float32)
    for index, values in enumerate(ranks):
        tail = np.full_like(total, 9.0)
        write_tail(tail, index, values)
        total += tail
    assert read_tail(total, 3) == [list(values) for values in ranks]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300])
def test_a_bad_number_stays_in_its_slot_and_stays_bad(bad):
    tail = np.zeros(tail_words(2, 2), np.float32)
    write_tail(tail, 1, (bad, 3.0))
    found = read_tail(tail, 2)
    assert found[0] == [0.0, 0.0]
    assert not math.isfinite(found[1][0])
    assert found[1][1] == 3.0
