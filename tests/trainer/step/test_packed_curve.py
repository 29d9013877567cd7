"""Packed samples and micro-batches filled by tokens: one curve however the batch is cut, on either backend."""

import numpy as np
import pytest
from tests.trainer.support.curves import UNEVEN, G, group_losses, losses, worst

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.step.rank import Settings

STEPS = 20
PACKED = {"samples": True, "data__packing": "best-fit", "data__sequence_length": 40}
ALL = pytest.mark.tier("all")


def test_packed_ranks_on_both_backends_draw_the_curve_of_one(new_rig, new_ranks):
    found = group_losses(new_ranks("ring", ("torch", "mlx"), **PACKED), UNEVEN)
    rig = new_rig("torch", **PACKED)
    assert rig.dataset.batch(np.arange(G)).positions is not None
    alone = losses(rig, False, STEPS)
    assert alone[-1] < 0.75 * alone[0], "it has to learn for this to mean anything"
    assert worst(found, alone) < 5e-5


def test_a_pack_is_the_sample(new_rig):
    packed, plain = new_rig("torch", **PACKED).dataset, new_rig("torch", **PACKED | {"data__packing": "none"}).dataset
    assert packed.samples < plain.samples / 2
    assert packed.mean_weight * packed.samples == pytest.approx(plain.mean_weight * plain.samples)
    every, single = packed.batch(np.arange(packed.samples)), plain.batch(np.arange(plain.samples))
    assert (every.weight, every.tokens) == (single.weight, single.tokens)
    assert every.lengths.tolist() == packed.targets(np.arange(packed.samples)).tolist()
    assert every.lengths.max() <= 40
    assert sorted(every.targets[every.counted > 0]) == sorted(single.targets[single.counted > 0])
    other = new_rig("torch", **PACKED, run={"name": "small", "steps": 1000, "seed": 4}).dataset
    assert len({packed.digest, plain.digest, other.digest}) == 3, "ranks compare digests before step 1"


def test_held_out_samples_are_not_packed(new_rig, assets):
    data = {"data__kind": "samples", "data__path": str(assets / "samples.jsonl"), "data__held_out": 0.2}
    one, other = (new_rig("torch", **data, data__packing=packing).dataset for packing in ("best-fit", "none"))
    everything = np.arange(one.held_out)
    assert one.held_out == other.held_out == 10
    assert one.held_out_batch(everything).inputs.tolist() == other.held_out_batch(everything).inputs.tolist()


@pytest.mark.parametrize(
    ("backend", "packing"),
    [
        ("torch", "best-fit"),
        *(pytest.param(*case, marks=ALL) for case in (("torch", "none"), ("mlx", "none"), ("mlx", "best-fit"))),
    ],
)
def test_micro_batches_filled_by_tokens_leave_the_curve_alone(new_rig, backend, packing):
    table = PACKED | {"data__packing": packing}
    plain, filled = (
        losses(new_rig(backend, **table, batch={"global": G, "micro": G, "micro_tokens": tokens}), True, STEPS)
        for tokens in (0, 90)
    )
    assert worst(filled, plain) < 1e-6


def test_a_node_s_own_micro_tokens_win_and_text_is_not_packed(run_file):
    config = run_file(batch={"global": G, "micro_tokens": 90}, nodes={"a": {"micro_tokens": 0}, "b": {}})
    assert [Settings.of(config, name).micro_tokens for name in ("a", "b", "other")] == [0, 90, 90]
    with pytest.raises(InvalidInputError, match=r"data\.packing: packs rows and samples; text fills its blocks"):
        run_file(data__packing="best-fit")


def test_a_model_that_mixes_documents_is_refused(load_backend, assets, tmp_path):
    """Bloom's attention knows no positions, so transformers makes no document mask for it."""
    import torch
    import transformers

    torch.manual_seed(0)
    small = transformers.BloomConfig(vocab_size=96, hidden_size=32, n_layer=2, n_head=2)
    transformers.BloomForCausalLM(small).save_pretrained(tmp_path / "bloom")
    data = {"data__path": str(assets / "samples.jsonl"), "data__kind": "samples", "data__packing": "best-fit"}
    with pytest.raises(InvalidInputError, match=r"^run\.toml: data\.packing: .* crosses the borders of packed samples"):
        load_backend(model__path=str(tmp_path / "bloom"), **data)
