"""Devices of torch: the one that a node asks for, its queue and memory, and memory of the host for fast copies.

A CUDA device copies to and from memory whose pages stay where they are at its bus's rate. torch's own allocator of such
memory rounds every size up to a power of two. Here an ordinary array is registered with the driver instead.
"""

import contextlib
import logging
import math
import os
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from trainctl.protocol.batch.device_table import types_of_capability
from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.backend import Device
from trainctl.trainer.backends.memory import HostMemory, Memory, SampledMemory, limit_process
from trainctl.trainer.backends.passes import Array

log = logging.getLogger(__name__)
_FOR_ALL_DEVICES = 1
"""cudaHostRegisterPortable: the memory counts as pinned for every device."""


class CudaMemory:
    """Memory by torch's allocator, which keeps the peak."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        total = int(torch.cuda.get_device_properties(device).total_memory)
        self._device, self._cap_bytes = device, min(total, limit_bytes or total)

    def read(self) -> Memory:
        # Once, not per number: each of torch's shorthands flattens and sorts the allocator's whole statistics.
        stats = torch.cuda.memory_stats_as_nested_dict(self._device)
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]["current"]
        return Memory(allocated["current"], allocated["peak"], self._cap_bytes, reserved - allocated["current"])

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def sample(self) -> None:
        """Do nothing: the allocator misses nothing."""


class CudaDevice(Device):
    has_own_memory = True

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        super().__init__(f"{device} {torch.cuda.get_device_name(device)}", CudaMemory(device, limit_bytes))
        self._device = device
        self._queued: deque[torch.cuda.Event] = deque()  # at the end of each backward that may still be running

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def mark(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end_pass(self, *, backward: bool) -> None:
        """Wait until the micro-batch before the last is done: a host far ahead of its device would show no sign of life
        for long, and couldn't be fenced."""
        if backward:
            self._queued.append(self.mark())
            if len(self._queued) > 1:
                self._queued.popleft().synchronize()

    def pin(self, flat: Array) -> None:
        pin(flat)

    def host_arrays(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
        return dict(zip(shapes, pinned_arrays(shapes.values()), strict=True))

    def free_cache(self) -> None:
        super().free_cache()
        torch.cuda.empty_cache()


class MpsMemory(SampledMemory):
    def __init__(self, limit_bytes: int | None) -> None:
        total = int(torch.mps.recommended_max_memory())
        super().__init__(_mps_bytes, min(total, limit_bytes or total))

    def read(self) -> Memory:
        kept = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory()
        return replace(super().read(), cache_bytes=kept)


class MpsDevice(Device):
    """Apple's GPU."""

    def __init__(self, device: torch.device, limit_bytes: int | None) -> None:
        super().__init__(str(device), MpsMemory(limit_bytes))

    def wait(self) -> None:
        torch.mps.synchronize()

    def free_cache(self) -> None:
        super().free_cache()
        torch.mps.empty_cache()


def _mps_bytes() -> int:
    torch.mps.synchronize()  # or memory is read before it is taken
    return torch.mps.current_allocated_memory()


def open_device(device: torch.device, limit_bytes: int | None) -> Device:
    """Return the device of a backend that may take so many bytes there; None: all that it has."""
    match device.type:
        case "cuda":
            return CudaDevice(device, limit_bytes)
        case "mps":
            return MpsDevice(device, limit_bytes)
        case _:
            return Device(str(device), HostMemory(limit_bytes))


def choose_device(wanted: str, where: str) -> torch.device:
    """Return the device of a node's `device` setting. Raises InvalidInputError, naming the field, if torch doesn't have
    it."""
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted in ("auto", "gpu") or (wanted == "cuda" and cuda):
        name = f"cuda:{fastest(_cards())}" if cuda else "mps" if mps else "cpu"
        if wanted == "gpu" and name == "cpu":
            raise InvalidInputError(f"{where}: nodes.device", "torch finds no GPU on this machine")
        return torch.device(name)
    device = torch.device(wanted)
    missing = (device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count())) or (
        device.type == "mps" and not mps
    )
    if missing:
        raise InvalidInputError(f"{where}: nodes.device", f"torch finds no device {wanted!r} on this machine")
    return device


def _cards() -> list[tuple[tuple[int, int], int]]:
    count = torch.cuda.device_count()
    if count < 2:
        return []
    processors = [torch.cuda.get_device_properties(index).multi_processor_count for index in range(count)]
    return [(torch.cuda.get_device_capability(index), processors[index]) for index in range(count)]


def fastest(cards: Sequence[tuple[tuple[int, int], int]]) -> int:
    """Return the number of the card that a rank takes where the run file names none: of the highest compute capability,
    of these the one with most multiprocessors, of these the first. protocol/machine/nvidia.py expects this."""
    return max(range(len(cards)), key=lambda number: (cards[number], -number), default=0)


def slow_type(capability: tuple[int, int], dtype: str) -> str | None:
    """Return what to say about a CUDA device that computes a data type without hardware for it; None if it has that.
    Not refused: a run keeps its type when it is resumed, and a run file may set one that is slow."""
    if dtype == "float32" or dtype in types_of_capability(capability):
        return None
    had = ", ".join(("float32", *types_of_capability(capability)))
    version = ".".join(map(str, capability))
    return (
        f"has compute capability {version} and no hardware for {dtype}: passes are slow. It has {had}; "
        f'model.dtype = "auto" takes the best type that the devices of all ranks have'
    )


def warn_of_slow_type(device: torch.device, dtype: str) -> None:
    """Warn in the rank's log."""
    if device.type == "cuda":
        said = slow_type(torch.cuda.get_device_capability(device), dtype)
        if said is not None:
            log.warning("%s %s %s", device, torch.cuda.get_device_name(device), said)


def choose_kernels(device: torch.device, node: NodeTable, *, tf32: bool) -> None:
    """Choose which of a CUDA device's kernels may be used: those in TF32, and those whose bits differ from one time to
    the next. Timing cuDNN's algorithms chooses by speed, so it is off where bits must be the same."""
    if device.type != "cuda":
        return
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = node.cudnn_benchmark and not node.deterministic
    if node.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as NVIDIA's documentation of cuBLAS asks for
        torch.use_deterministic_algorithms(True)


def limit_memory(device: torch.device, limit_bytes: int) -> None:
    """Let this process take at most so many bytes on its device."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(min(2.0, limit_bytes / torch.mps.recommended_max_memory()))
    else:
        limit_process(limit_bytes)


def pinned_arrays(shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    """Return float32 arrays of these shapes, with any contents, in one block; ordinary ones where the driver refuses
    it."""
    shapes = [*shapes]
    ends = np.cumsum([math.prod(shape) for shape in shapes], dtype=np.int64)
    flat = np.empty(int(ends[-1]) if len(ends) else 0, np.float32)
    if flat.size:
        pin(flat)
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=False)]


def pin(flat: Array) -> None:
    """Pin an array's memory where it is, until the array is freed; nothing where the driver refuses it. The memory may
    be shared with other processes. To be called by the thread that uses the device."""
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = flat.ctypes.data
    if int(driver.cudaHostRegister(address, flat.nbytes, _FOR_ALL_DEVICES)) == 0:
        weakref.finalize(flat, driver.cudaHostUnregister, address).atexit = False
        return
    with contextlib.suppress(RuntimeError):  # the refusal stays as the last error until a kernel's start meets it
        torch.zeros(1, device="cuda")
