"""The bounds of documents in packs: every token in one document, and documents as transformers finds them."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trainctl.trainer.attention.document_bounds import DocumentBounds, document_bounds

Rows = Sequence[Sequence[int]]
packs = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5)


def bounds_of(rows: Rows, more: int = 0) -> tuple[DocumentBounds, NDArray[np.int32], NDArray[np.int64]]:
    """Those of rows of documents with so many tokens, padded to the longest and `more`; positions and lengths too."""
    lengths = np.array([sum(row) for row in rows], np.int64)
    positions = np.zeros((len(rows), int(lengths.max()) + more), np.int32)
    for place, row in enumerate(rows):
        positions[place, : lengths[place]] = np.concatenate([np.arange(length) for length in row])
    return document_bounds(positions, lengths), positions, lengths


def test_documents_begin_where_positions_do_and_padding_is_one() -> None:
    (starts, longest), _, _ = bounds_of([[3, 2], [1, 1, 1], [5]])
    assert starts.tolist() == [0, 3, 5, 6, 7, 8, 10, 15]
    assert starts.dtype == np.int32
    assert longest == 5


@pytest.mark.parametrize(("rows", "starts", "longest"), [([[1]], [0, 1], 1), ([[4, 3]], [0, 4, 7], 4)])
def test_a_batch_of_one_row(rows: Rows, starts: list[int], longest: int) -> None:
    assert bounds_of(rows)[0].starts.tolist() == starts
    assert bounds_of(rows)[0].longest == longest


@given(packs, st.integers(0, 3))
@example([[1], [9, 9]], 0)
def test_documents_of_a_row_are_whole_and_in_order(rows: Rows, more: int) -> None:
    found, positions, lengths = bounds_of(rows, more)
    width = positions.shape[1]
    expected = [size for row in rows for size in [*row, width - sum(row)] if size]
    assert np.diff(found.starts).tolist() == expected
    assert found.longest == max(expected)
    assert found.starts[-1] == len(lengths) * width


@given(packs)
def test_tokens_share_a_document_exactly_where_transformers_masks_none(rows: Rows) -> None:
    from transformers.masking_utils import find_packed_sequence_indices

    found, positions, lengths = bounds_of(rows)
    numbers = np.repeat(np.arange(len(found.starts) - 1), np.diff(found.starts)).reshape(positions.shape)
    theirs = find_packed_sequence_indices(torch.from_numpy(positions).long())
    for row, length in enumerate(lengths):
        ours = numbers[row, :length]
        other = np.zeros(length) if theirs is None else theirs[row, :length].numpy()
        assert np.array_equal(ours[:, None] == ours, other[:, None] == other)
