"""The best rate of a device's matrix products by data type, and the bandwidth of its memory."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Final, Protocol

from trainctl.protocol.calibration.profile import MatmulRate
from trainctl.trainer.backends.backend import Backend

SIZES: Final = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the matrices."""
MATMUL_SECONDS: Final = 6.0
"""Time for products in all data types of a calibration of 60 s; a size that would take longer isn't measured."""
REPEATS: Final = 3
"""Products of one size, of which the fastest counts."""
CORE_SIZE: Final = 512
"""Largest matrices for the rate of one core."""
COPY_BYTES: Final = 256 << 20
"""Bytes of the block whose copying measures memory: larger than the caches of processors."""
CUDA_COPY_BYTES: Final = 1 << 30
"""The same on a CUDA device, whose start of a copy takes some 20 microseconds."""
LEAST_COPY_BYTES: Final = 16 << 20
"""Bytes of the smallest block that is tried where memory is short."""


class DeviceWork(Protocol):
    """What an array library does on the device of a backend."""

    def dtypes(self) -> tuple[str, ...]: ...
    def product(self, dtype: str, size: int) -> Callable[[], None]:
        """A product of two square matrices, which waits for the device."""

    def copy(self, size_bytes: int) -> Callable[[], None]:
        """Reads a block and writes it elsewhere, and waits for the device."""

    def one_core(self) -> contextlib.AbstractContextManager[bool]:
        """Within it, one thread works; False if that can't be had."""


def work_of(backend: Backend) -> DeviceWork:
    """What measures a backend's device."""
    if backend.name == "mlx":
        from trainctl.trainer.calibration.mlx_work import MlxWork

        return MlxWork()
    from trainctl.trainer.calibration.torch_work import TorchWork

    return TorchWork(backend.device.split()[0])


def matmul_rates(
    work: DeviceWork, is_out_of_memory: Callable[[BaseException], bool], seconds: float = MATMUL_SECONDS
) -> Iterator[MatmulRate]:
    """Yield the rate of one data type after another; `seconds`: for all of them."""
    each = seconds / 2 / len(work.dtypes())
    for dtype in work.dtypes():
        gflops = _best(work, dtype, SIZES[-1], is_out_of_memory, each)
        with work.one_core() as alone:
            per_core = _best(work, dtype, CORE_SIZE, is_out_of_memory, each) if alone else None
        if gflops:
            yield MatmulRate(dtype, gflops, per_core or None)


def copy_bytes(backend: Backend) -> int:
    """Size of the block that is copied on a backend's device."""
    return CUDA_COPY_BYTES if backend.device.startswith("cuda") else COPY_BYTES


def copy_rate(
    work: DeviceWork, is_out_of_memory: Callable[[BaseException], bool], size: int = COPY_BYTES
) -> float | None:  # fmt: skip
    """Bytes read and written per second, of smaller blocks where memory is short; None if it is too short."""
    while size >= LEAST_COPY_BYTES:
        try:
            return 2 * size / _fastest(work.copy(size))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            size //= 2
    return None


def _best(
    work: DeviceWork, dtype: str, largest: int, is_out_of_memory: Callable[[BaseException], bool], most: float
) -> float:
    """Return 10^9 operations per second; 0 if no size can be multiplied. `most`: seconds."""
    best, deadline = 0.0, time.monotonic() + most
    for size in (size for size in SIZES if size <= largest):
        try:
            seconds = _fastest(work.product(dtype, size))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            break
        best = max(best, 2 * size**3 / seconds / 1e9)
        if time.monotonic() + 8 * seconds * (REPEATS + 2) > deadline:  # the next size has eight times the operations
            break
    return best


def _fastest(run: Callable[[], None]) -> float:
    """Seconds, after one that warms up. A short one is repeated until the clock can tell."""
    run()
    begun = time.perf_counter()
    run()
    count = max(1, min(1000, math.ceil(0.01 / max(time.perf_counter() - begun, 1e-7))))
    return min(_timed(run, count) for _ in range(REPEATS))


def _timed(run: Callable[[], None], count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - begun) / count
