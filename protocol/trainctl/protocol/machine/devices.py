"""The 16-bit data types of a machine's devices, read without a tensor library, and the precision of a whole group."""

import functools
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from trainctl.protocol.config.run_file import needs_torch
from trainctl.protocol.config.run_tables import ComputeDtype, NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.messages import DeviceTypes

BFLOAT16_CAPABILITY: Final = (8, 0)
"""Compute capability of CUDA devices from which products in bfloat16 are computed in hardware: Ampere."""
FLOAT16_CAPABILITY: Final = (7, 0)
"""The same for float16 at more than float32's rate: Volta, and then Turing. Pascal has it at 1/64 of that rate."""
_CPU_FLAGS = ("avx512_bf16", "amx_bf16")
"""Of /proc/cpuinfo: torch's matrix library computes products in bfloat16 with these instructions."""
_MLX_ON_CUDA = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")


def types_of_capability(capability: tuple[int, int]) -> tuple[ComputeDtype, ...]:
    """Of a CUDA device. The GTX 16 cards are Turing without tensor cores: float16 still is twice as fast."""
    if capability >= BFLOAT16_CAPABILITY:
        return ("bfloat16", "float16")
    return ("float16",) if capability >= FLOAT16_CAPABILITY else ()


@functools.cache
def read_devices() -> tuple[DeviceTypes, ...]:
    """Those that the installed backends can compute on, each backend's default first; the default backend's first.
    Takes some 100 ms with NVIDIA's driver, once."""
    found = {"torch": [*_of_torch()], "mlx": [*_of_mlx()]}
    order = ("mlx", "torch") if sys.platform == "darwin" else ("torch", "mlx")
    return tuple(device for backend in order for device in found[backend])


def rank_types(
    devices: Sequence[DeviceTypes], table: NodeTable, *, torch_only: bool = False
) -> tuple[str, tuple[str, ...]] | None:
    """The device that a rank with these settings gets, and its 16-bit types; None if no device is known."""
    backend = "torch" if torch_only and table.backend == "auto" else table.backend
    wanted = "cuda:0" if table.device == "cuda" else table.device
    for one in devices:
        is_wanted = wanted in ("auto", one.device) or (wanted == "gpu" and one.device != "cpu")
        if backend in ("auto", one.backend) and is_wanted:
            return one.device, one.types
        if backend == "auto":
            backend = one.backend  # a trainer chooses its backend before its device
            if is_wanted:
                return one.device, one.types
    return None


def resolve(config: RunFile, devices: Mapping[str, Sequence[DeviceTypes]], where: str) -> tuple[RunFile, str]:
    """The run file with a data type in place of "auto", and the reason in words; unchanged and empty without "auto".
    All ranks compute in one: bfloat16 if all of their devices have it, else float16 if all have that, else float32.
    Raises InvalidInputError for a node whose devices aren't known."""
    if config.model.dtype != "auto":
        return config, ""
    types: dict[str, tuple[str, tuple[str, ...]]] = {}
    for node, table in config.nodes.items():
        found = rank_types(devices.get(node, ()), table, torch_only=needs_torch(config))
        if found is None:
            problem = f'"auto" needs to know the device of {node}, which has not said what it has: set a type, such as'
            raise InvalidInputError(f"{where}: model.dtype", f'{problem} "float32"')
        types[node] = found
    chosen = next((one for one in ("bfloat16", "float16") if all(one in has for _, has in types.values())), "float32")
    model = msgspec.structs.replace(config.model, dtype=chosen)
    return msgspec.structs.replace(config, model=model), _reason(chosen, types)


def resolve_alone(config: RunFile, node: str, where: str) -> RunFile:
    """As `resolve`, for a process that computes on this machine with no group."""
    tables = {node: config.nodes.get(node, NodeTable())}
    alone, _ = resolve(msgspec.structs.replace(config, nodes=tables), {node: read_devices()}, where)
    return msgspec.structs.replace(config, model=alone.model)


def _reason(chosen: str, types: Mapping[str, tuple[str, tuple[str, ...]]]) -> str:
    if chosen == "bfloat16":
        return "all ranks compute in bfloat16, which each of their devices has"
    wanted = "bfloat16" if chosen == "float16" else "float16"
    without = ", ".join(f"{node} ({device})" for node, (device, has) in types.items() if wanted not in has)
    if chosen == "float32":
        lacking = [f"{node} ({device})" for node, (device, has) in types.items() if not has]
        without = ", ".join(lacking) or without
        return f"all ranks compute in float32, since {without} has no faster 16-bit type that all have"
    return f"all ranks compute in float16, since {without} has no bfloat16"


def _of_torch() -> Iterator[DeviceTypes]:
    version = installed_version("torch")
    if version is None:
        return
    if sys.platform == "darwin" and platform.machine() == "arm64":
        yield DeviceTypes("torch", "mps", ("bfloat16", "float16"))
    elif not version.endswith("+cpu"):
        yield from _of_cuda("torch")
    yield DeviceTypes("torch", "cpu", _of_cpu())


def _of_mlx() -> Iterator[DeviceTypes]:
    """MLX's kernels for a CPU compute 16-bit types no faster than float32."""
    if installed_version("mlx") is None:
        return
    if sys.platform == "darwin" and platform.machine() == "arm64":
        yield DeviceTypes("mlx", "gpu", ("bfloat16", "float16"))
    elif any(installed_version(name) for name in _MLX_ON_CUDA):
        yield from (DeviceTypes("mlx", "gpu", one.types) for one in _of_cuda("mlx"))
    yield DeviceTypes("mlx", "cpu", ())


def _of_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    try:
        flags = next((line for line in cpuinfo.read_text("utf-8", "replace").splitlines() if line[:5] == "flags"), "")
    except OSError:
        return ()
    return ("bfloat16",) if set(_CPU_FLAGS) & set(flags.split()) else ()


def _of_cuda(backend: Literal["torch", "mlx"]) -> Iterator[DeviceTypes]:
    yield from (
        DeviceTypes(backend, f"cuda:{index}", types_of_capability(capability))
        for index, capability in enumerate(capabilities())
    )


@functools.cache
def capabilities() -> tuple[tuple[int, int], ...]:
    """Compute capability of each NVIDIA device, as the driver says; () without one or its Python module."""
    try:
        import pynvml
    except ImportError:
        return ()
    nvml: Any = pynvml
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        major_minor = [nvml.nvmlDeviceGetCudaComputeCapability(handle) for handle in handles]
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ()
    return tuple((int(major), int(minor)) for major, minor in major_minor)
