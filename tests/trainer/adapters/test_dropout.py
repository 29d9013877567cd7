"""Dropout of adapters: the same elements on either backend and under any split, independent of each other."""

import numpy as np
import pytest
from tests.trainer.support.curves import UNEVEN, group_losses, losses, worst

from trainctl.trainer.adapters.lora import channel_keys, kept, threshold, token_keys

DROPOUT = {"kind": "lora", "rank": 4, "alpha": 64.0, "dropout": 0.3}
STEPS = 20


def adapted(new_rig, backend, **changes):
    return new_rig(backend, **{"samples": True, "adapter": DROPOUT, "optimizer__learning_rate": 1e-2, **changes})


def mask(dropout, *, seed=1, place=0, first=0):
    tokens = token_keys(seed, np.arange(first, first + 32), 96)
    return kept(tokens, channel_keys(place, 160), threshold(dropout))


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("all"))])
def test_resizing_micro_batches_never_bends_the_curve(new_rig, backend):
    undisturbed, resized = (losses(adapted(new_rig, backend), cut, STEPS) for cut in (False, True))
    assert undisturbed[0] / undisturbed[-1] - 1 > 1000 * 1e-5, "it has to learn for this to mean anything"
    assert worst(resized, undisturbed) < 1e-5
    plain = losses(adapted(new_rig, backend, adapter=DROPOUT | {"dropout": 0.0}), False, STEPS)
    assert worst(undisturbed, plain) > 1e-3, "something has to be dropped"


@pytest.mark.parametrize("packing", ["best-fit", pytest.param("none", marks=pytest.mark.tier("all"))])
def test_torch_and_mlx_draw_the_same_curve(new_rig, packing):
    table = {"data__packing": packing, "data__sequence_length": 40}
    curves = [losses(adapted(new_rig, name, **table), False, STEPS) for name in ("torch", "mlx")]
    assert worst(*curves) < 5e-5


def test_two_ranks_draw_the_curve_of_one(new_rig, new_ranks):
    table = {"samples": True, "adapter": DROPOUT}
    found = group_losses(new_ranks("ring", ("torch", "mlx"), **table), UNEVEN)
    assert worst(found, losses(new_rig("torch", **table), False, STEPS)) < 5e-5


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_evaluation_drops_nothing(new_rig, backend):
    dropping, plain = (
        adapted(new_rig, backend, adapter=DROPOUT | {"dropout": rate}).backend for rate in (0.3, 0.0)
    )  # fmt: skip
    chance = np.random.default_rng(1)
    noise = {name: chance.normal(0, 0.1, shape).astype(np.float32) for name, shape in plain.shapes.items()}
    for each in (plain, dropping):
        each.copy_in("weights", noise)
    batch = adapted(new_rig, backend).dataset.batch(np.arange(8))
    assert dropping.evaluate(batch) == plain.evaluate(batch)


def test_torch_mlx_and_numpy_drop_the_same_elements():
    import mlx.core as mx
    import torch

    tokens, channels = token_keys(5, np.array([0, 7, 2**41]), 33), channel_keys(3, 70)
    wanted = kept(tokens, channels, threshold(0.1))
    assert np.array_equal(kept(torch.from_numpy(tokens), torch.from_numpy(channels), threshold(0.1)).numpy(), wanted)
    assert np.array_equal(np.array(kept(mx.array(tokens), mx.array(channels), threshold(0.1))), wanted)


@pytest.mark.parametrize("dropout", [0.01, 0.5, 0.9])
def test_the_wanted_fraction_is_dropped_everywhere(dropout):
    """Means over samples, tokens and channels scatter as those of independent draws."""
    masks = [~mask(dropout, seed=seed) for seed in range(10)]
    for axis in range(3):
        means = np.array([np.moveaxis(one, axis, 0).reshape(one.shape[axis], -1).mean(axis=1) for one in masks])
        deviation = np.sqrt(dropout * (1 - dropout) / (masks[0].size / means.shape[1]))
        assert np.abs(means - dropout).max() < 5 * deviation
        assert np.abs(means.mean() - dropout) < 4 * deviation / np.sqrt(means.size)
        assert np.sqrt(np.square(means - dropout).mean()) == pytest.approx(deviation, rel=0.15)


def test_masks_of_other_seeds_layers_positions_tokens_and_channels_are_unrelated():
    one = mask(0.5)
    others = [mask(0.5, seed=2), mask(0.5, place=1), mask(0.5, first=1), one[:, ::-1], one[:, :, ::-1]]
    others += [np.roll(one, shift, axis) for axis in range(3) for shift in (1, 2, 8)]
    for other in others:
        assert (one == other).mean() == pytest.approx(0.5, abs=5 * 0.5 / np.sqrt(one.size / 2))


def test_the_specification_s_elements():
    low, odd = 2**32 - 1, 0x45D9F3B
    wide = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)

    def mix(x):
        x = (x ^ x >> 30) * wide[0] % 2**64
        x = (x ^ x >> 27) * wide[1] % 2**64
        return x ^ x >> 31

    def hashed(x):
        for _ in range(2):
            x = (x ^ x >> 16) * odd & low
        return x ^ x >> 16

    def stays(token, channel):
        key = hashed((mix(mix(3) + 2**40) + token) & low) ^ hashed((mix(mix(0x64726F70) + 2) + channel) & low)
        element = key * odd & low
        element = (element ^ element >> 16) * odd & low
        return (element ^ 2**31) >= round(0.3 * 2**32)

    tokens = token_keys(3, np.array([2**40]), 20)
    wanted = [[stays(token, channel) for channel in range(30)] for token in range(20)]
    assert kept(tokens, channel_keys(2, 30), threshold(0.3))[0].tolist() == wanted
