"""Weights in 16 bits: masters come back to the bit, and stochastic rounding is the same in NumPy, torch and MLX."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.support.passes import trained

from trainctl.trainer.precision.stochastic_rounding import key_of, rounded

KEY = (0xE2CF6E06, 0xA74F63B7)
"""Of seed 3, update 7, place 11."""
VALUES = np.array([1.0, 1.001, -1.001, 0.1, -0.1, 3.14159, 1e-30, -1e30, 0.0, 65504.5], np.float32)
GOLDEN = [0x3F80, 0x3F81, 0xBF80, 0x3DCC, 0xBDCD, 0x4049, 0x0DA2, 0xF14A, 0x0000, 0x4780]
NAMES = ("torch", "mlx")


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global mlx_weights, mx, torch, torch_weights
    import mlx.core as mx
    import torch

    from trainctl.trainer.precision import mlx_weights, torch_weights


def by(library, values, key):
    if library == "mlx":
        return np.array(mlx_weights.round_stochastically(mx.array(values), key))
    return by_torch(values, key, 0)


def by_torch(values, key, first):
    rounding = torch_weights.Rounding(torch.device("cpu"))
    found = rounding.of(torch.from_numpy(values), key, first)
    return found.to(torch.int16).numpy().view(np.uint16)


def test_the_generator_is_the_specified_one():
    assert key_of(3, 7, 11) == KEY
    assert rounded(VALUES, KEY).tolist() == GOLDEN
    for library in NAMES:
        assert by(library, VALUES, KEY).tolist() == GOLDEN


@given(st.integers(0, 2**40), st.integers(1, 2**40), st.integers(0, 4000), st.integers(1, 3000))
def test_all_libraries_round_alike(seed, update, place, count):
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    key = key_of(seed, update, place)
    expected = rounded(values, key)
    for library in NAMES:
        np.testing.assert_array_equal(by(library, values, key), expected)
    part = by_torch(values[count // 2 :].copy(), key, count // 2)
    np.testing.assert_array_equal(part, expected[count // 2 :])


def test_large_parameters_are_rounded_in_blocks_to_the_same_bits():
    values = np.random.default_rng(5).standard_normal(3 * (1 << 16) + 17).astype(np.float32)
    expected = rounded(values, KEY)
    np.testing.assert_array_equal(by("mlx", values, KEY), expected)
    parameter = torch.nn.Parameter(torch.zeros(len(values)))
    weights = torch_weights.RoundedWeights([parameter], 3)
    weights.store(0, 0, torch.from_numpy(values), 7)
    np.testing.assert_array_equal(
        parameter.detach().view(torch.int16).numpy().view(np.uint16), rounded(values, key_of(3, 7, 0))
    )
    last = (1 << 32) - 5  # the counter of elements wraps
    wrapped = by_torch(values[:9], KEY, last)
    np.testing.assert_array_equal(wrapped[5:], rounded(values[5:9], KEY))


def test_the_expected_result_is_the_value():
    values = np.full(200_000, 1 + 2**-7 * 0.3, np.float32)  # 0.3 of the way to the next bfloat16
    up = rounded(values, key_of(1, 2, 3)) == 0x3F81
    assert up.mean() == pytest.approx(0.3, abs=0.005)
    other = rounded(values, key_of(1, 3, 3)) == 0x3F81
    assert np.corrcoef(up, other)[0, 1] == pytest.approx(0, abs=0.02), "updates draw their own numbers"


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=60))
def test_masters_come_back_to_the_bit(numbers):
    values = np.array(numbers, np.float32)
    parameter = torch.nn.Parameter(torch.from_numpy(values.copy()))
    split = torch_weights.SplitWeights([parameter])
    np.testing.assert_array_equal(split.values(0).numpy().view(np.int32), values.view(np.int32))
    theirs = mlx_weights.MlxSplitWeights({"p": mx.array(values)})
    np.testing.assert_array_equal(np.array(theirs.values("p").view(mx.int32)), values.view(np.int32))
    ours = parameter.detach().view(torch.int16).numpy()
    np.testing.assert_array_equal(ours, np.array(theirs.computed["p"].view(mx.int16)))
    plain = torch.from_numpy(values).bfloat16()
    ties = (values.view(np.uint32) & 0xFFFF) == 0x8000
    np.testing.assert_array_equal(ours[~ties], plain.view(torch.int16).numpy()[~ties], "the nearest")


def same(one, other):
    return all(np.array_equal(array, other[name]) for name, array in one.items())


@pytest.mark.parametrize("dtype", ["bf16-sr", pytest.param("bfloat16", marks=pytest.mark.tier("all"))])
def test_offloaded_moments_and_8_bit_ones_update_pieces(load_backend, dtype):
    plain, moved = (
        trained(load_backend, "torch", model__dtype=dtype, optimizer__offload=offload) for offload in (False, True)
    )
    assert same(plain.copy_of("weights"), moved.copy_of("weights"))
    eight = trained(load_backend, "torch", model__dtype=dtype, optimizer__kind="adamw-8bit")
    expected = plain.copy_of("weights")
    differences = [np.linalg.norm(array - expected[name]) for name, array in eight.copy_of("weights").items()]
    assert 0 < max(differences) < 0.05 * max(np.linalg.norm(array) for array in expected.values())


def test_pieces_of_float32_weights_are_torchs_update_to_the_bit(load_backend):
    whole, pieces = (trained(load_backend, "torch", optimizer__offload=offload) for offload in (False, True))
    assert type(whole._optimizer) is not type(pieces._optimizer)
    assert same(whole.copy_of("weights"), pieces.copy_of("weights"))
