"""Memory of the host whose pages stay where they are, so that a CUDA device copies to and from it at its bus's rate.

torch's own allocator of such memory rounds every size up to a power of two. Here an ordinary array is registered with
the driver instead.
"""

import contextlib
import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from trainctl.trainer.backends.base import Array

_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable: the memory counts as pinned for every device."""


def pinned_arrays(shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    """Float32 arrays of these shapes, with any contents, in one block; ordinary ones where the driver refuses it."""
    shapes = [*shapes]
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64)
    flat = np.empty(int(ends[-1]) if len(ends) else 0, np.float32)
    if flat.size:
        register(flat)
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=False)]


def register(flat: Array) -> None:
    """Pin an array's memory where it is, until the array is freed; nothing where the driver refuses it. The memory may
    be shared with other processes. To be called by the thread that uses the device."""
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = flat.ctypes.data
    if int(driver.cudaHostRegister(address, flat.nbytes, _FOR_ALL_DEVICES)) == 0:
        weakref.finalize(flat, driver.cudaHostUnregister, address).atexit = False
        return
    with contextlib.suppress(RuntimeError):  # the refusal stays as the last error until a kernel's start meets it
        torch.zeros(1, device="cuda")
