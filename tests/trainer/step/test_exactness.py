"""Micro-batches and packs are speed and memory only: the loss is the undisturbed run's, step for step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.curves import TOLERANCES, UNEVEN, G, group_losses, losses, plain_losses, worst
from tests.trainer.support.library_trainers import library_model
from tests.trainer.support.passes import furthest, loss_and_gradient

from trainctl.protocol.config.run_tables import NodeTable, micro_tokens_of
from trainctl.protocol.errors import InvalidInputError

GOLDEN = Path(__file__).parents[2] / "golden" / "trainer" / "losses.json"
ALL = pytest.mark.tier("all")


@pytest.mark.parametrize(
    ("backend", "samples"),
    [("torch", True), ("mlx", True), *(pytest.param(name, False, marks=ALL) for name in ("torch", "mlx"))],
)
def test_resizing_micro_batches_never_bends_the_curve(curve, backend, samples):
    undisturbed = curve(backend, samples=samples, resized=False)
    assert undisturbed[-1] < 0.75 * undisturbed[0], "it has to learn for this to mean anything"
    assert worst(curve(backend, samples=samples, resized=True), undisturbed) < 1e-5


def test_the_curve_is_that_of_a_plain_torch_loop(curve, new_rig):
    import torch

    rig = new_rig("torch", samples=True)
    model = library_model(rig).train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    plain = plain_losses(rig, model, optimizer, 15)
    assert worst(curve("torch", samples=True, resized=True)[:15], plain) < 1e-5


@pytest.mark.parametrize("samples", [True, pytest.param(False, marks=ALL)])
def test_torch_and_mlx_draw_the_same_curve(curve, samples):
    assert worst(curve("torch", samples=samples, resized=True), curve("mlx", samples=samples, resized=False)) < 5e-5


class Misweighted:
    """A backend that divides each micro-batch by its own tokens or its own samples: the mistakes that sums avoid."""

    def __init__(self, inner, by):
        self._inner, self._by = inner, by

    def loss_and_gradient(self, batch, scales, **how):
        factor = 50.0 / self._by(batch)
        self._inner.loss_and_gradient(batch, {term: scale * factor for term, scale in scales.items()}, **how)
        inner: Any = self._inner
        inner._added[-1] = [number * factor for number in inner._added[-1]]

    def __getattr__(self, name):
        return getattr(self._inner, name)


@pytest.mark.tier("all")
@pytest.mark.parametrize("by", [lambda batch: batch.weight, lambda batch: float(len(batch))], ids=["tokens", "samples"])
def test_a_mean_of_means_would_not_pass(new_rig, by):
    rigs = (new_rig("torch", samples=True, wrap=lambda backend: Misweighted(backend, by)) for _ in range(2))
    assert worst(*(losses(rig, resized, 12) for rig, resized in zip(rigs, (False, True), strict=True))) > 100 * 1e-5


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_gradients_do_not_depend_on_the_cut(new_rig, backend):
    rig = new_rig(backend, samples=True)
    cuts = ([rig.dataset.batch(np.arange(12)[at : at + micro]) for at in range(0, 12, micro)] for micro in (12, 1, 5))
    whole, *others = (loss_and_gradient(rig.backend, *cut, scale=1 / 64)[1] for cut in cuts)
    assert max(furthest(other, whole) for other in others) <= 1e-5


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", "bfloat16"),
        *(pytest.param(*case, marks=ALL) for case in (("torch", "float16"), ("mlx", "bfloat16"), ("mlx", "float16"))),
    ],
)
def test_lower_dtypes_keep_to_their_own_tolerance(new_rig, curve, backend, dtype):
    tolerance = TOLERANCES[dtype]
    exact = curve(backend, samples=False, resized=False)[:15]
    lower = [losses(new_rig(backend, model__dtype=dtype), resized, 15) for resized in (False, True)]
    assert worst(lower[0], lower[1]) < tolerance
    assert 1e-7 < worst(lower[0], exact) < 10 * tolerance, "computed in another dtype, and yet close"


def test_the_optimizers_agree_where_epsilon_and_decay_matter(new_rig):
    """With a large epsilon, strong decay and beta2 = 0.999, another place or order of either would be seen."""
    table = {"learning_rate": 1e-3, "epsilon": 1e-2, "weight_decay": 5.0, "beta2": 0.999, "clip_norm": 0.0}
    weights, first = [], None
    for backend in ("torch", "mlx"):
        rig = new_rig(backend, optimizer=table)
        first = first or rig.backend.export_state().weights
        for step in range(1, 16):
            rig.train(step, G, learning_rate=1e-3)
        weights.append(rig.backend.export_state().weights)
    for name, array in weights[0].items():
        moved = np.linalg.norm(array - first[name])
        assert np.linalg.norm(array - weights[1][name]) < 1e-4 * moved, name
        ones = np.ones_like(first[name])
        if first[name].ndim == 1:
            assert np.linalg.norm(array - ones) < 0.03 * np.linalg.norm(ones), "norms aren't decayed: it would be 0.07"


def test_golden_losses(curve):
    """Other libraries' versions may round otherwise; they may not train otherwise."""
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    for kind, expected in golden.items():
        assert worst(curve("torch", samples=kind == "masked", resized=False)[: len(expected)], expected) < 2e-5


STEPS = 20
PACKED = {"samples": True, "data__packing": "best-fit", "data__sequence_length": 40}


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
    tables = (config.nodes.get(name, NodeTable()) for name in ("a", "b", "other"))
    assert [micro_tokens_of(config, table) for table in tables] == [0, 90, 90]
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
