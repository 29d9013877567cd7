"""The masks of packs in transformers."""


def test_documents_are_those_that_transformers_finds():
    import torch
    from transformers import masking_utils

    from trainctl.trainer.attention import torch_masks

    torch_masks.install()
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1]])
    expected = masking_utils.find_packed_sequence_indices(positions)
    with torch_masks.documents_by_position():
        found = masking_utils.find_packed_sequence_indices(positions)
    assert found.tolist() == expected.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 0, 1, 1]]
    with torch_masks.one_document_per_row():
        assert masking_utils.find_packed_sequence_indices(positions) is None
