"""Each device computes as a CPU does in float64, counts its memory, and trains one rank to the curve of a CPU."""

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.hardware.devices import ACCELERATORS, PROCESSORS, Device
from tests.trainer.support.curves import TOLERANCES, losses, worst

from trainctl.protocol import messages as m
from trainctl.trainer.backends.passes import Decoding

pytestmark = pytest.mark.usefixtures("gpu_as_found")
SIZE = 256
"""Rows and columns of the matrices."""
PRODUCTS = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
"""Largest difference from the product in float64, relative to it, by Frobenius norms. Unit roundoffs are 2^-24, 2^-9
and 2^-12; TF32, with 2^-11, is over float32's."""
HELD_BYTES, SLACK_BYTES, HUGE_BYTES = 64 << 20, 1 << 20, 1 << 46
"""Bytes that are allocated to see them counted, by which an allocator may round, and more than any accelerator has."""
STEPS = 20
LORA = {"kind": "lora", "rank": 4, "dropout": 0.1}


class Library(NamedTuple):
    """An array library on one device."""

    product: Callable[[NDArray[np.float32], NDArray[np.float32], str], NDArray[np.float32]]
    hold: Callable[[int], object]  # allocates bytes, and waits for the device
    used_bytes: Callable[[], int]
    empty: Callable[[], None]  # gives unused memory back
    is_out_of_memory: Callable[[BaseException], bool]


@pytest.fixture
def library(device: Device) -> Library:
    return _mlx(device.device) if device.backend == "mlx" else _torch(device.device)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    found: Device = request.param
    return found


def _torch(name: str) -> Library:
    import torch

    from trainctl.trainer.backends.torch_backend import TorchBackend

    module: Any = getattr(torch, name)
    counter = {"cuda": "memory_allocated", "mps": "current_allocated_memory"}.get(name)

    def product(left: Any, right: Any, dtype: str) -> Any:
        one, other = (torch.from_numpy(matrix).to(name, getattr(torch, dtype)) for matrix in (left, right))
        return (one @ other).float().cpu().numpy()

    def hold(size: int) -> object:
        held = torch.empty((max(1, size >> 30), min(size, 1 << 30)), dtype=torch.uint8, device=name)
        module.synchronize()
        return held

    return Library(
        product, hold, getattr(module, counter or "", lambda: 0), getattr(module, "empty_cache", gc.collect),
        TorchBackend.is_out_of_memory,
    )  # fmt: skip


def _mlx(name: str) -> Library:
    import mlx.core as mx

    from trainctl.trainer.backends.mlx_backend import MlxBackend

    stream: Any = mx.cpu if name == "cpu" else mx.gpu

    def product(left: Any, right: Any, dtype: str) -> Any:
        one, other = (mx.array(matrix).astype(getattr(mx, dtype), stream=stream) for matrix in (left, right))
        return np.array(mx.matmul(one, other, stream=stream).astype(mx.float32, stream=stream))

    def hold(size: int) -> object:
        held = mx.ones((max(1, size >> 30), min(size, 1 << 30)), mx.uint8, stream=stream)
        mx.eval(held)
        return held

    return Library(product, hold, mx.get_active_memory, mx.clear_cache, MlxBackend.is_out_of_memory)


@pytest.mark.parametrize("device", ACCELERATORS + PROCESSORS, indirect=True)
@pytest.mark.parametrize("dtype", PRODUCTS)
def test_a_product_is_that_in_float64_within_the_type_s_rounding(library, dtype, figure):
    numbers = np.random.Generator(np.random.PCG64(7))
    left, right = (numbers.standard_normal((SIZE, SIZE), np.float32) for _ in range(2))
    exact = left.astype(np.float64) @ right.astype(np.float64)
    products = [library.product(left, right, dtype) for _ in range(2)]
    apart = np.linalg.norm(products[0] - exact) / np.linalg.norm(exact)
    figure(difference=f"{apart:.2g}", repeats=np.array_equal(*products))
    assert 0 < apart <= PRODUCTS[dtype]


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
def test_memory_is_counted_and_its_lack_is_recognized(library):
    library.empty()
    before = library.used_bytes()
    held = library.hold(HELD_BYTES)
    during = library.used_bytes()
    assert HELD_BYTES - SLACK_BYTES <= during - before <= 2 * HELD_BYTES
    del held
    library.empty()
    assert library.used_bytes() <= during - HELD_BYTES + SLACK_BYTES
    with pytest.raises((RuntimeError, MemoryError, ValueError)) as error:
        library.hold(HUGE_BYTES)
    assert library.is_out_of_memory(error.value), error.value


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_the_curve_is_that_of_a_cpu_at_the_tolerance_of_each_type(new_rig, device, dtype, figure):
    curve, cpu = (
        losses(new_rig(device.backend, node=node, model__dtype=dtype), True, STEPS) for node in (device.table, {})
    )
    assert cpu[-1] < 0.99 * cpu[0], "it has to learn for this to mean anything"
    figure(difference=f"{worst(curve, cpu):.2g}", losses=curve)
    assert 0 < worst(curve, cpu) < TOLERANCES[dtype]


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
@pytest.mark.parametrize("changes", [{"model__dtype": dtype} for dtype in TOLERANCES] + [{"adapter": LORA}], ids=str)
def test_a_resumed_run_continues_bit_for_bit(new_rig, device, changes):
    straight, resumed = (new_rig(device.backend, node=device.table, **changes) for _ in range(2))
    for step in range(1, 6):
        straight.train(step, 5)
    resumed.backend.import_state(straight.backend.export_state())
    resumed.progress.load(5, straight.progress.cursor)
    resumed.form(m.Generation(2, 1))
    resumed.rank.loss_scale = straight.rank.loss_scale
    expected = [straight.train(step, 5).loss_sum for step in range(6, 12)]
    found = [resumed.train(step, 5, generation=m.Generation(2, 1)).loss_sum for step in range(6, 12)]
    assert found == expected
    one, other = (rig.backend.export_state() for rig in (straight, resumed))
    assert all(np.array_equal(array, other.weights[name]) for name, array in one.weights.items())


@pytest.mark.parametrize("device", ACCELERATORS, indirect=True)
def test_answers_are_those_of_a_cpu(new_rig, device):
    how = Decoding(12, 0.0, 1.0, 1)
    found = []
    for node in (device.table, {}):
        rig = new_rig(device.backend, node=node)
        for step in range(1, 9):
            rig.train(step, 4)
        found.append(rig.backend.generate([100, 101, 102], how, [], lambda: None))
    assert found[0] == found[1]
