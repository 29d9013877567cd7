"""The best rate of a device's matrix products by data type, and the bandwidth of its memory."""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

from trainctl.protocol.calibration.profile import MatmulRate
from trainctl.trainer.backends.backend import Backend

DTYPES: Final = ("float32", "bfloat16", "float16")
SIZES: Final = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices."""
MATMUL_SECONDS: Final = 6.0
"""Time for products in all data types of a calibration of 60 s; a size that would take longer isn't measured."""
REPEATS: Final = 3
"""Times that work is measured, of which the fastest counts."""
CORE_SIZE: Final = 512
"""Largest matrices for the rate of one core."""
COPY_BYTES: Final = 256 << 20
"""Bytes of the block whose copying measures memory: larger than the caches of processors."""
CUDA_COPY_BYTES: Final = 1 << 30
"""The same on a CUDA device, whose start of a copy takes some 20 microseconds."""
MIN_COPY_BYTES: Final = 16 << 20
"""Bytes of the smallest block that is tried where memory is short."""
Work = Callable[[], object]
"""What is timed."""


def matmul_rates(backend: Backend, seconds: float = MATMUL_SECONDS) -> Iterator[MatmulRate]:
    """Yield the rate of one data type after another; `seconds`: for all of them. Only torch on a CPU can be measured
    with one core: MLX doesn't let a program choose its threads."""
    each = seconds / 2 / len(DTYPES)
    for dtype in DTYPES:
        gflops, per_core = _best_gflops(backend, dtype, SIZES[-1], each), None
        if backend.name == "torch" and backend.device.startswith("cpu"):
            import torch

            threads = torch.get_num_threads()
            torch.set_num_threads(1)
            try:
                per_core = _best_gflops(backend, dtype, CORE_SIZE, each)
            finally:
                torch.set_num_threads(threads)
        if gflops:
            yield MatmulRate(dtype, gflops, per_core or None)


def copy_rate(backend: Backend) -> float | None:
    """Return the bytes read and written per second, of smaller blocks where memory is short; None without any."""
    size = CUDA_COPY_BYTES if backend.device.startswith("cuda") else COPY_BYTES
    while size >= MIN_COPY_BYTES:
        if (seconds := _fastest(backend, partial(_copy, size))) is not None:
            return 2 * size / seconds
        size //= 2
    return None


def _best_gflops(backend: Backend, dtype: str, largest: int, most_seconds: float) -> float:
    best, deadline = 0.0, time.monotonic() + most_seconds
    for size in (size for size in SIZES if size <= largest):
        seconds = _fastest(backend, partial(_product, dtype, size))
        if seconds is None:
            break
        best = max(best, 2 * size**3 / seconds / 1e9)
        if time.monotonic() + 8 * seconds * (REPEATS + 2) > deadline:  # the next size has eight times the work
            break
    return best


def _fastest(backend: Backend, prepare: Callable[[Backend], Work]) -> float | None:
    """Return the seconds of work after a time that warms up, None if memory is too short. Short work is repeated until
    the clock can tell."""
    try:
        work = prepare(backend)
        _mean_seconds(backend, work, 1)
        count = max(1, min(1000, math.ceil(0.01 / max(_mean_seconds(backend, work, 1), 1e-7))))
        return min(_mean_seconds(backend, work, count) for _ in range(REPEATS))
    except (RuntimeError, MemoryError) as error:
        if not backend.is_out_of_memory(error):
            raise
        return None


def _mean_seconds(backend: Backend, work: Work, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        work()
        backend.wait()
    return (time.perf_counter() - begun) / count


def _product(dtype: str, size: int, backend: Backend) -> Work:
    """Return a product of two square matrices, with torch of random values: constant ones need less power, and a GPU
    would then be up to 13 % faster."""
    if backend.name == "mlx":
        import mlx.core as mx

        ones = [mx.ones((size, size), getattr(mx, dtype)) for _ in range(2)]
        mx.eval(ones)
        return lambda: mx.eval(ones[0] @ ones[1])
    import torch

    left = torch.randn(size, size, dtype=getattr(torch, dtype), device=backend.device.split()[0])
    right, out = left.flip(0), torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def _copy(size_bytes: int, backend: Backend) -> Work:
    """Return the copying of a block."""
    if backend.name == "mlx":
        import mlx.core as mx

        ones = mx.ones((size_bytes // 4,), mx.float32)
        mx.eval(ones)
        return lambda: mx.eval(mx.negative(ones))
    import torch

    block, out = (torch.ones(size_bytes // 4, device=backend.device.split()[0]) for _ in range(2))
    return lambda: out.copy_(block)
