"""A device of MLX, as the self-test's device check needs it."""

from typing import Any, Final

import mlx.core as mx
import numpy as np

from trainctl.protocol.machine.facts import installed_version
from trainctl.trainer.backends.mlx_backend import MlxBackend
from trainctl.trainer.selftest.checked_device import Array, Device, DeviceMemory

_BLOCK_BYTES: Final = 1 << 30
"""Bytes of a row of an allocation: an array's sizes stay below 2^31."""


def open_device(name: str) -> Device | None:
    """The device, "gpu" or "cpu"; None if MLX has no such one."""
    kind = mx.cpu if name == "cpu" else mx.gpu
    if not mx.is_available(kind):
        return None
    mx.set_default_device(mx.Device(kind))
    return Device(
        title=f"mlx {name}", is_host=name == "cpu", facts=_facts(kind), product=_product, hold=_hold, memory=_memory,
        empty=mx.clear_cache, is_out_of_memory=MlxBackend.is_out_of_memory,
    )  # fmt: skip


def _facts(kind: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"mlx": installed_version("mlx"), "metal": bool(mx.metal.is_available())}
    if kind == mx.gpu:
        facts["device_info"] = dict(mx.device_info())
    return facts


def _product(left: Array, right: Array, dtype: str) -> Array:
    one, other = (mx.array(matrix).astype(getattr(mx, dtype)) for matrix in (left, right))
    return np.array((one @ other).astype(mx.float32))


def _hold(size: int) -> Any:
    shape = (size,) if size < _BLOCK_BYTES else (size // _BLOCK_BYTES, _BLOCK_BYTES)
    held = mx.zeros(shape, mx.uint8) + mx.array(1, mx.uint8)
    mx.eval(held)
    return held


def _memory() -> DeviceMemory:
    return DeviceMemory(mx.get_active_memory(), mx.get_peak_memory())
