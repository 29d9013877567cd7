"""Each backend knows its own library's words for memory that ran out, and not the other's."""

import pytest

TORCH = [
    "CUDA out of memory. Tried to allocate 2.00 GiB.",
    "MPS backend out of memory (MPS allocated: 17.00 GB)",
    "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
    "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
    "Failed to allocate a buffer",
    "Invalid buffer size: 16.00 GiB",
    "std::bad_alloc: bad allocation",
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
