"""A rank's device: the card that it takes, how often a step waits for it, pinned memory, and memory that ran out."""

import gc

import pytest
from tests.trainer.support.pinned import doubled_by_another_process

from trainctl.trainer.collective.shared_buffer import Layout, SharedBuffer


@pytest.mark.parametrize(
    ("cards", "number"),
    [
        ([], 0), ([((6, 1), 20), ((8, 6), 82)], 1), ([((8, 6), 28), ((8, 6), 82), ((7, 5), 72)], 1),
        ([((9, 0), 132), ((9, 0), 132)], 0), ([((7, 5), 72), ((6, 1), 30)], 0), ([((9, 0), 132), ((12, 0), 36)], 1),
    ],
)  # fmt: skip
def test_the_card_that_can_do_most_is_taken(cards, number):
    from trainctl.trainer.backends.torch_device import fastest

    assert fastest(cards) == number


@pytest.mark.parametrize(
    ("capability", "dtype", "had"),
    [
        ((8, 0), "bfloat16", None),
        ((7, 5), "float16", None),
        ((7, 5), "bfloat16", "float32, float16"),
        ((6, 1), "float16", "float32"),
    ],
)
def test_a_type_that_a_card_has_no_hardware_for_is_named(capability, dtype, had):
    from trainctl.trainer.backends.torch_device import slow_type

    said = slow_type(capability, dtype)
    assert said is None if had is None else f" no hardware for {dtype}: " in said and f". It has {had}; " in said


@pytest.fixture
def reads():
    """Counts reads of single numbers, by which a host waits."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    kinds = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)

    class Reads(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func in kinds
            return func(*args, **(kwargs or {}))

    return Reads()


@pytest.mark.parametrize("micro", [2, 12])
def test_a_step_on_torch_reads_its_sums_and_the_norm(new_rig, reads, monkeypatch, micro):
    import torch

    rig = new_rig("torch", samples=True)
    rig.train(1, 4)
    lists, to_list = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor) or to_list(tensor))
    with reads:
        rig.train(2, micro)
    assert reads.count + len(lists) == 2


def test_each_phase_on_mlx_evaluates_at_most_once(new_rig, monkeypatch):
    import mlx.core as mx

    rig, found, evaluate = new_rig("mlx", samples=True), [], mx.eval
    rig.train(1, 4)
    monkeypatch.setattr(mx, "eval", lambda *arrays: found.append(arrays) or evaluate(*arrays))
    rig.train(2, 4)
    three = len(found)
    rig.train(3, 2)
    each = 4  # publishing the model and the loss; the gradient; the sum
    assert (three, len(found) - three) == (3 * each + 3, 6 * each + 3), "with one for the sums, the norm and the update"


class Driver:
    """The part of CUDA's runtime that pins memory. It reads what it is given, as the real one does."""

    def __init__(self):
        self.pinned: dict[int, int] = {}  # bytes by address

    def cudaHostRegister(self, address, size, flags):
        assert flags == 1
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address):
        del self.pinned[address]
        return 0


@pytest.fixture
def driver(monkeypatch):
    global torch_device
    import torch

    from trainctl.trainer.backends import torch_device

    made = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    return made


def test_a_shared_buffer_stays_pinned_as_long_as_a_view_of_it_is_held(driver):
    buffer = SharedBuffer.create(100)
    views = Layout({"a": (10, 3), "b": (7,)}, "").views(buffer.floats)
    address = buffer.floats.ctypes.data
    torch_device.pin(buffer.floats)
    assert driver.pinned == {address: 400}
    views["a"][...] = 2.0
    buffer.close()
    del buffer
    gc.collect()
    assert driver.pinned == {address: 400} and float(views["a"].sum()) == 60.0
    views.clear()
    gc.collect()
    assert driver.pinned == {}


def test_arrays_of_one_block_are_pinned_together(driver):
    first, second = torch_device.pinned_arrays([(4, 2), (3,)])
    assert driver.pinned == {first.ctypes.data: 4 * 11} and second.ctypes.data == first.ctypes.data + 4 * 8
    del first, second
    gc.collect()
    assert driver.pinned == {}
    assert torch_device.pinned_arrays([]) == []


@pytest.mark.parametrize("library", ["torch", "mlx"])
def test_a_rank_on_a_cpu_pins_nothing(driver, new_rig, library):
    doubled_by_another_process(new_rig(library).backend, 0)
    assert driver.pinned == {}


TORCH = [
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "MPS backend out of memory (MPS allocated: 17.00 GB)",
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "Failed to allocate a buffer",
    "Invalid buffer size: 16.00 GiB",
    "std::bad_alloc: bad allocation",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
]
MLX = [
    "[malloc] Unable to allocate 8 bytes.",
    "[malloc_or_wait] Unable to allocate 8 bytes.",
    "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPU)",
    "[cuda] out of memory",
    "std::bad_alloc",
]
OTHER = ["mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)", "[matmul] Last dimension of first input"]
ONLY_MLX = ["malloc(): corrupted top size", "NCCL: unable to allocate a port", "insufficient memory bandwidth"]
ONLY_TORCH = ["[metal] failed to allocate a command encoder", "can't allocate memory address"]


@pytest.fixture(params=[("torch", TORCH, ONLY_MLX), ("mlx", MLX, ONLY_TORCH)], ids=["torch", "mlx"])
def words(request):
    """A backend, what its library says where memory ran out, and what only the other's would mean by it."""
    from trainctl.trainer.backends.mlx_backend import MlxBackend
    from trainctl.trainer.backends.torch_backend import TorchBackend

    name, own, others = request.param
    return {"torch": TorchBackend, "mlx": MlxBackend}[name], own, others


def test_only_what_a_library_says_where_memory_ran_out_is_a_full_device(words):
    backend, own, others = words
    assert [text for text in own if not backend.is_out_of_memory(RuntimeError(text))] == []
    assert [text for text in [*others, *OTHER] if backend.is_out_of_memory(RuntimeError(text))] == []
    assert backend.is_out_of_memory(MemoryError())


def test_an_error_of_torch_s_own_type_is_one_whatever_it_says():
    import torch

    from trainctl.trainer.backends.torch_backend import TorchBackend

    assert TorchBackend.is_out_of_memory(torch.OutOfMemoryError("no room"))
