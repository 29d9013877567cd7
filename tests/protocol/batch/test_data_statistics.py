"""Statistics of data against plain counting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.batch.data_statistics import padding, percentiles


def test_percentiles_are_lengths_that_occur() -> None:
    lengths = np.array([2] * 50 + [3] * 45 + [9] * 5, np.int64)
    assert percentiles(lengths) == {"p50": 3, "p90": 3, "p95": 9, "p99": 9, "p100": 9}
    assert set(percentiles(np.array([7], np.int64)).values()) == {7}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 12))
def test_padding_is_the_share_of_positions_without_a_token(lengths: list[int], micro: int) -> None:
    rows = [row for start in range(0, len(lengths), micro) for row in padded(lengths[start : start + micro])]
    empty = sum(row.count(0) for row in rows)
    assert np.isclose(padding(np.array(lengths, np.int64), micro), empty / sum(map(len, rows)))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 200))
def test_micro_batches_filled_by_tokens_are_within_them_or_of_one_sample(
    lengths: list[int], micro: int, tokens: int
) -> None:
    ordered = np.array(sorted(lengths, reverse=True), np.int64)
    assert 0 <= padding(ordered, micro, tokens) <= padding(ordered, micro) + 1e-12
    assert padding(ordered, micro, 1) == 0
    assert padding(ordered, micro, 50 * 12) == padding(ordered, micro)


def padded(lengths: list[int]) -> list[list[int]]:
    return [[1] * length + [0] * (max(lengths) - length) for length in lengths]
