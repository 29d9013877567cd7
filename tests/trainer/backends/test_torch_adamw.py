"""AdamW by bitsandbytes: what the library does on its own, and the same after a checkpoint."""

import importlib.util

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.support.passes import accumulate, blocks

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.backend import ADAMW_SLOTS

RATE, UPDATES = 1e-2, 3
EIGHT_BIT = ("adamw-8bit", "paged-adamw-8bit")


@pytest.fixture(autouse=True, scope="module")
def libraries():
    global bitsandbytes, torch, torch_adamw
    import bitsandbytes
    import torch

    from trainctl.trainer.backends import torch_adamw


@pytest.fixture
def opened(load_backend):
    return lambda kind: load_backend(optimizer__kind=kind, optimizer__weight_decay=0.1)


def train(backend, first, updates=UPDATES):
    """Do so many updates; return the gradient of each."""
    found = []
    for step in range(first, first + updates):
        accumulate(backend, blocks(seed=step), scale=1 / 60)
        found.append(backend.copy_out("accumulators"))
        backend.update(RATE, 1.0)
    return found


@pytest.fixture
def in_pieces(monkeypatch):
    """Parameters of the small model are updated in several pieces, as larger ones are."""
    monkeypatch.setattr(torch_adamw, "_PIECE_VALUES_ON_CPU", 4096)


@pytest.mark.usefixtures("in_pieces")
@pytest.mark.parametrize("kind", ["adamw-8bit", "paged-adamw"])
def test_updates_are_bitsandbytes_own(opened, kind):
    ours = opened(kind)
    assert len(ours._optimizer._pieces) > len(ours.shapes)
    start = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in ours.copy_out("weights").items()}
    groups = [
        {"params": [p for p in start.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in start.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    bits = 8 if kind in EIGHT_BIT else 32
    theirs = bitsandbytes.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, optim_bits=bits)
    for gradients in train(ours, 0):
        for name, parameter in start.items():
            parameter.grad = torch.from_numpy(gradients[name])
        theirs.step()
    for name, array in ours.copy_out("weights").items():
        np.testing.assert_array_equal(array, start[name].detach().numpy(), name)
    stored = [state["state1"].dtype for state in theirs.state.values()]
    assert (torch.uint8 in stored) == (bits == 8)


def test_moments_of_float32_are_rounded_no_worse_than_by_bitsandbytes(opened):
    before, after = opened("adamw"), opened("adamw-8bit")
    train(before, 0)
    after.import_state(before.export_state())
    for slot, signed in zip(ADAMW_SLOTS, (True, False), strict=True):
        numbers = bitsandbytes.functional.create_dynamic_map(signed=signed)
        expected, found = before.copy_out(slot), after.copy_out(slot)
        for name, array in expected.items():
            if array.size < 4096:
                np.testing.assert_array_equal(found[name], array)
                continue
            codes, state = bitsandbytes.functional.quantize_blockwise(
                torch.from_numpy(array), code=numbers, blocksize=256
            )
            theirs = bitsandbytes.functional.dequantize_blockwise(codes, state).numpy()
            errors = np.abs(found[name] - array), np.abs(theirs - array)
            assert (errors[0] <= errors[1] + 1e-6 * np.abs(array).max()).all(), "the nearest value"
            assert errors[0].any()


@given(st.integers(1, 3_000_000), st.integers(16, 2000))
def test_pieces_are_whole_blocks_and_none_is_too_small_for_8_bits(count, blocks):
    pieces = [*torch_adamw._bounds(count, 256 * blocks)]
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == count
    *before, last = (stop - start for start, stop in pieces)
    assert all(size == 256 * blocks for size in before)
    assert last > 4096 or not before


@given(
    st.integers(0, 2**32 - 1), st.integers(1, 900), st.booleans(), st.floats(1e-30, 1e10),
    st.sampled_from(["any", "negative", "mirrored", "zeros"]),
)  # fmt: skip
def test_packed_values_come_back(seed, count, signed, size, block):
    """Codes as the library makes them: some value of a block is its largest magnitude, of either sign."""
    numbers = bitsandbytes.functional.create_dynamic_map(signed=signed)
    random = np.random.default_rng(seed)
    values = random.standard_normal(count).astype(np.float32) * np.float32(size)
    mirrored = np.concatenate([-values, np.float32(0.992) * values])[:256]
    kinds = {"any": values, "negative": -np.abs(values), "mirrored": mirrored, "zeros": 0 * values}
    values = kinds[block] if signed else np.abs(values)
    codes, state = bitsandbytes.functional.quantize_blockwise(torch.from_numpy(values), code=numbers, blocksize=256)
    stored = torch_adamw._unpacked(codes, state.absmax, numbers)
    theirs = bitsandbytes.functional.dequantize_blockwise(codes, state)
    torch.testing.assert_close(stored, theirs, rtol=0, atol=0)
    again = torch_adamw._unpacked(*torch_adamw._packed(stored, numbers), numbers)
    torch.testing.assert_close(again, stored, rtol=0, atol=0)


def test_an_8_bit_run_takes_a_quarter_of_the_memory(opened):
    whole, packed = (opened(kind)._optimizer for kind in ("adamw", "adamw-8bit"))
    large = [index for index, state in enumerate(packed._states) if "absmax1" in state]
    assert large

    def size(optimizer, names):
        return sum(optimizer._states[index][name].nbytes for index in large for name in names)

    assert size(packed, ("state1", "state2", "absmax1", "absmax2")) < 0.26 * size(whole, ADAMW_SLOTS)


def test_mlx_and_a_machine_without_bitsandbytes_are_refused(run_file, opened, monkeypatch):
    with pytest.raises(InvalidInputError, match=r"run\.toml: nodes\.here\.backend: MLX has no 'adamw-8bit'"):
        run_file(optimizer__kind="adamw-8bit", nodes__here={"backend": "mlx"})
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else find(name))
    with pytest.raises(InvalidInputError, match=r"optimizer\.kind: 'paged-adamw' needs bitsandbytes; .*bitsandbytes"):
        opened("paged-adamw")
