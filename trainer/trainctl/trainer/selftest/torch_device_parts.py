"""A device of torch, as the self-test's device check needs it."""

from typing import Any, Final, cast

import numpy as np
import torch

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.torch_backend import TorchBackend
from trainctl.trainer.backends.torch_device import choose_device
from trainctl.trainer.selftest.checked_device import Array, Device, DeviceMemory

_BLOCK_BYTES: Final = 1 << 30
"""Bytes of a row of an allocation: a tensor's sizes stay below 2^31."""


def open_device(name: str) -> Device | None:
    """The device; None if torch doesn't find it."""
    try:
        device = choose_device(name, "self-test")
    except InvalidInputError:
        return None
    torch.set_num_threads(1)
    return Device(
        title=f"torch {_title(device)}",
        is_host=device.type == "cpu",
        facts=_facts(device),
        product=lambda left, right, dtype: _product(device, left, right, dtype),
        hold=lambda size: _hold(device, size),
        memory=lambda: _memory(device),
        empty=lambda: _empty(device),
        is_out_of_memory=TorchBackend.is_out_of_memory,
    )


def _title(device: torch.device) -> str:
    return f"{device} {torch.cuda.get_device_name(device)}" if device.type == "cuda" else str(device)


def _facts(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found, cudnn = torch.cuda.get_device_properties(device), cast(Any, torch.backends.cudnn)
        facts |= {
            "cuda": torch.version.cuda, "capability": [found.major, found.minor], "memory_bytes": found.total_memory,
            "multiprocessors": found.multi_processor_count, "cudnn": cudnn.version(),
            "devices": torch.cuda.device_count(),
        }  # fmt: skip
    if device.type == "mps":
        facts["recommended_memory_bytes"] = torch.mps.recommended_max_memory()
    return facts


def _product(device: torch.device, left: Array, right: Array, dtype: str) -> Array:
    one, other = (torch.from_numpy(matrix).to(device, getattr(torch, dtype)) for matrix in (left, right))
    made: Array = (one @ other).float().cpu().numpy()
    return np.ascontiguousarray(made)


def _hold(device: torch.device, size: int) -> torch.Tensor:
    shape = (size,) if size < _BLOCK_BYTES else (size // _BLOCK_BYTES, _BLOCK_BYTES)
    held = torch.empty(shape, dtype=torch.uint8, device=device)
    _wait(device)
    return held


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def _memory(device: torch.device) -> DeviceMemory | None:
    if device.type == "cuda":
        return DeviceMemory(torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return DeviceMemory(torch.mps.current_allocated_memory(), None)
    return None


def _empty(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()
