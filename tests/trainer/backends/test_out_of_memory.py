"""Each backend knows its own library's words for memory that ran out, and not the other's."""

import pytest
import torch

from trainctl.trainer.backends.base import Backend
from trainctl.trainer.backends.mlx_backend import MlxBackend
from trainctl.trainer.backends.torch_backend import TorchBackend

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


@pytest.mark.parametrize(("backend", "texts"), [(TorchBackend, TORCH), (MlxBackend, MLX)])
def test_what_a_library_says_where_memory_ran_out(backend: type[Backend], texts: list[str]) -> None:
    for text in texts:
        assert backend.is_out_of_memory(RuntimeError(text)), text
    assert backend.is_out_of_memory(MemoryError())


@pytest.mark.parametrize(("backend", "texts"), [(TorchBackend, ONLY_MLX), (MlxBackend, ONLY_TORCH)])
def test_any_other_error_is_not_taken_for_a_full_device(backend: type[Backend], texts: list[str]) -> None:
    for text in [*texts, *OTHER]:
        assert not backend.is_out_of_memory(RuntimeError(text)), text


def test_an_error_of_torch_s_own_type_is_one_whatever_it_says() -> None:
    assert TorchBackend.is_out_of_memory(torch.OutOfMemoryError("no room"))
