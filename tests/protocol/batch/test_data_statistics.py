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
    groups = [lengths[start : start + micro] for start in range(0, len(lengths), micro)]
    positions = sum(max(group) * len(group) for group in groups)
    assert np.isclose(padding(np.array(lengths, np.int64), micro), 1 - sum(lengths) / positions)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 12), st.integers(1, 200))
def test_a_micro_batch_takes_the_samples_that_fit_its_positions_and_one_at_least(
    lengths: list[int], micro: int, tokens: int
) -> None:
    groups: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        last = groups[-1] if groups else []
        if last and len(last) < micro and last[0] * (len(last) + 1) <= tokens:
            last.append(length)
        else:
            groups.append([length])
    ordered = np.array(sorted(lengths, reverse=True), np.int64)
    positions = sum(group[0] * len(group) for group in groups)
    assert np.isclose(padding(ordered, micro, tokens), 1 - sum(lengths) / positions)
