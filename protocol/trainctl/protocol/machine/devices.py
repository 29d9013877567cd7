"""The 16-bit data types of a machine's devices, read without a tensor library, and the precision of a whole group."""

import contextlib
import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from trainctl.protocol.batch.device_table import types_of_capability, types_of_device
from trainctl.protocol.config.env_policy import VISIBLE
from trainctl.protocol.config.run_file import needs_torch
from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.machine.nvidia import CARD, cards, seen, visible
from trainctl.protocol.messages import DeviceTypes

_CPU_FLAGS = ("avx512_bf16", "amx_bf16")
"""Flags of /proc/cpuinfo: torch's matrix library computes products in bfloat16 with these instructions."""
AUTO_TYPES: Final = ("bfloat16", "float16")
"""Types that "auto" stands for if all devices have it, the best first; else it is float32."""
SYSCTL_SECONDS: Final = 2.0
"""Longest that macOS may take to say the name of its chip."""
MLX_FOR_CUDA: Final = ("mlx-cuda", "mlx-cuda-12", "mlx-cuda-13")
"""Distributions of MLX's library for NVIDIA GPUs."""


@functools.cache
def read_devices() -> tuple[DeviceTypes, ...]:
    """Return the devices that the installed backends can compute on, each backend's default first; the default
    backend's first. Takes some 100 ms with NVIDIA's driver, once."""
    found = {"torch": [*_of_torch()], "mlx": [*_of_mlx()]}
    order = ("mlx", "torch") if sys.platform == "darwin" else ("torch", "mlx")
    return tuple(device for backend in order for device in found[backend])


def rank_types(
    devices: Sequence[DeviceTypes], table: NodeTable, *, torch_only: bool = False
) -> tuple[str, tuple[str, ...]] | None:
    """The device that a rank with these settings gets, and its 16-bit types; None if no device is known."""
    backend = "torch" if torch_only and table.backend == "auto" else table.backend
    wanted = table.device
    for one in seen(devices, table.env):
        is_wanted = wanted in ("auto", one.device, one.device.partition(":")[0])
        is_wanted |= wanted == "gpu" and one.device != "cpu"
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
    Without nodes in the run file, those of `devices` take part. Raises InvalidInputError for a node whose devices
    aren't known."""
    if config.model.dtype != "auto":
        return config, ""
    types: dict[str, tuple[str, tuple[str, ...]]] = {}
    for node, table in (config.nodes or dict.fromkeys(devices, NodeTable())).items():
        found = rank_types(devices.get(node, ()), table, torch_only=needs_torch(config))
        if found is None:
            problem = f'"auto" needs to know the device of {node}, which has not said what it has: set a type, such as'
            raise InvalidInputError(f"{where}: model.dtype", f'{problem} "float32"')
        types[node] = found
    if not types:
        raise InvalidInputError(f"{where}: model.dtype", '"auto" needs a node: name one in [nodes.NAME]')
    chosen = next((one for one in AUTO_TYPES if all(one in has for _, has in types.values())), "float32")
    model = msgspec.structs.replace(config.model, dtype=chosen)
    return msgspec.structs.replace(config, model=model), _reason(chosen, types)


def resolve_alone(config: RunFile, node: str, where: str) -> RunFile:
    """Return a run file as `resolve` does, for a process that computes on this machine with no group."""
    tables = {node: config.nodes.get(node, NodeTable())}
    alone, _ = resolve(msgspec.structs.replace(config, nodes=tables), {node: read_devices()}, where)
    return msgspec.structs.replace(config, model=alone.model)


def devices_named(name: str) -> tuple[DeviceTypes, ...]:
    """Return the device of a machine of which only that device's name is known; empty if its types aren't."""
    types = types_of_device(name)
    return () if types is None else (DeviceTypes("torch", "cuda:0", types),)


def unsuited(config: RunFile, devices: Mapping[str, Sequence[DeviceTypes]]) -> tuple[str, ...]:
    """Return what to say about nodes whose GPU lacks the bfloat16 that the run file sets, a line each. It works there,
    slowly."""
    if config.model.dtype == "auto" or config.model.computed != "bfloat16":
        return ()
    tables = {node: config.nodes.get(node, NodeTable()) for node in devices}
    found = {node: rank_types(devices[node], table, torch_only=needs_torch(config)) for node, table in tables.items()}
    return tuple(
        f'model.dtype = "{config.model.dtype}": {one[0]}{f" of {node}" if node else ""} computes it without hardware '
        f'for it, slowly; "auto" takes the best type that the devices of all ranks have'
        for node, one in found.items()
        if one is not None and one[0] != "cpu" and "bfloat16" not in one[1]
    )


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
        yield DeviceTypes("torch", "mps", _of_apple_gpu(apple_chip()))
    elif not version.endswith("+cpu"):
        yield from _of_cuda("torch")
    yield DeviceTypes("torch", "cpu", _of_cpu())
    yield from _hidden("torch")


def _of_mlx() -> Iterator[DeviceTypes]:
    """MLX's kernels for a CPU compute 16-bit types no faster than float32."""
    if installed_version("mlx") is None:
        return
    if sys.platform == "darwin" and platform.machine() == "arm64":
        yield DeviceTypes("mlx", "gpu", _of_apple_gpu(apple_chip()))
    elif any(installed_version(name) for name in MLX_FOR_CUDA):
        yield from (DeviceTypes("mlx", "gpu", one.types) for one in _of_cuda("mlx"))
    yield DeviceTypes("mlx", "cpu", ())
    if any(installed_version(name) for name in MLX_FOR_CUDA):
        yield from _hidden("mlx")


def apple_chip() -> str:
    """Return the chip's name, such as Apple M1 Pro; empty if the system doesn't say it."""
    command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SYSCTL_SECONDS)
        return done.stdout.strip()
    return ""


def _of_apple_gpu(chip: str) -> tuple[str, ...]:
    """A chip without a name is taken for a new one: only the M1 lacks bfloat16."""
    return types_of_device(chip) or ("bfloat16", "float16")


def _of_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    try:
        flags = next((line for line in cpuinfo.read_text("utf-8", "replace").splitlines() if line[:5] == "flags"), "")
    except OSError:
        return ()
    return ("bfloat16",) if set(_CPU_FLAGS) & set(flags.split()) else ()


def _of_cuda(backend: Literal["torch", "mlx"]) -> Iterator[DeviceTypes]:
    """The cards that this process's environment shows."""
    found = cards()
    chosen = os.environ.get(VISIBLE)
    if found and chosen is not None and chosen.strip().startswith("MIG-"):  # a part of one card, of whichever
        yield DeviceTypes(backend, "cuda:0", types_of_capability(min(card.capability for card in found)))
        return
    uuids = {card.uuid: number for number, card in enumerate(found)}
    shown = range(len(found)) if chosen is None else visible(chosen, range(len(found)), uuids)
    for index, number in enumerate(shown):
        yield DeviceTypes(backend, f"cuda:{index}", types_of_capability(found[number].capability))


def _hidden(backend: Literal["torch", "mlx"]) -> Iterator[DeviceTypes]:
    """All cards, if the environment doesn't show them all as they are: a run file can show others to a rank."""
    if VISIBLE in os.environ:
        for number, card in enumerate(cards()):
            yield DeviceTypes(backend, f"{CARD}{number}", types_of_capability(card.capability))
