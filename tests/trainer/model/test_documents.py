"""The bounds of documents in packs: every token in one document, and documents as transformers finds them."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

packs = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5)


def bounds_of(rows, more=0):
    """Return the bounds, positions and lengths of rows of documents, padded to the longest and `more`."""
    from trainctl.trainer.model.torch_attention import document_bounds

    lengths = np.array([sum(row) for row in rows], np.int64)
    positions = np.zeros((len(rows), int(lengths.max()) + more), np.int32)
    for place, row in enumerate(rows):
        positions[place, : lengths[place]] = np.concatenate([np.arange(length) for length in row])
    return document_bounds(positions, lengths), positions, lengths


@given(packs, st.integers(0, 3))
@example([[1], [9, 9]], 0)
def test_documents_of_a_row_are_whole_and_in_order(rows, more):
    found, positions, lengths = bounds_of(rows, more)
    width = positions.shape[1]
    expected = [size for row in rows for size in [*row, width - sum(row)] if size]
    assert np.diff(found).tolist() == expected
    assert found.dtype == np.int32
    assert found[-1] == len(lengths) * width


@given(packs)
def test_tokens_share_a_document_exactly_where_transformers_masks_none(rows):
    import torch
    from transformers.masking_utils import find_packed_sequence_indices

    found, positions, lengths = bounds_of(rows)
    numbers = np.repeat(np.arange(len(found) - 1), np.diff(found)).reshape(positions.shape)
    theirs = find_packed_sequence_indices(torch.from_numpy(positions).long())
    for row, length in enumerate(lengths):
        ours = numbers[row, :length]
        other = np.zeros(length) if theirs is None else theirs[row, :length].numpy()
        assert np.array_equal(ours[:, None] == ours, other[:, None] == other)


def test_documents_are_those_that_transformers_finds():
    import torch
    from transformers import masking_utils

    from trainctl.trainer.model import torch_attention

    torch_attention.install_masks()
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1]])
    expected = masking_utils.find_packed_sequence_indices(positions)
    with torch_attention.documents_per_row("several"):
        found = masking_utils.find_packed_sequence_indices(positions)
    assert found.tolist() == expected.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 0, 1, 1]]
    with torch_attention.documents_per_row("one"):
        assert masking_utils.find_packed_sequence_indices(positions) is None
