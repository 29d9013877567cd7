"""Environment variables: those worth setting on a platform, and popular ones that do nothing or harm. Plain values.

Checked against MLX 0.32 (its headers, libraries and page of environment variables), torch 2.13 (its page of CUDA
environment variables) and this program's own code.
"""

from collections.abc import Collection
from typing import Final, Literal

import msgspec

Platform = Literal["Apple GPU", "NVIDIA GPU", "CPU"]
ALL: Final[tuple[Platform, ...]] = ("Apple GPU", "NVIDIA GPU", "CPU")


class Variable(msgspec.Struct, frozen=True):
    """What is said of one."""

    name: str
    value: str  # to set; empty: leave it unset
    use: Literal["set", "no effect", "avoid"]
    text: str
    source: str  # where that is stated
    platforms: tuple[Platform, ...] = ALL


_MLX: Final = "MLX: usage/environment_variables"
VARIABLES: Final = (
    Variable(
        "PYTORCH_ALLOC_CONF", "expandable_segments:True", "set",
        "less memory is lost between samples of unequal lengths; PYTORCH_CUDA_ALLOC_CONF is its old name",
        "PyTorch: CUDA environment variables, memory management", ("NVIDIA GPU",),
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES", "0", "set",
        "for one node per GPU, each with its own number, as nvidia-smi numbers them",
        "PyTorch: CUDA semantics", ("NVIDIA GPU",),
    ),
    Variable("CUDA_DEVICE_ORDER", "", "avoid", "trainctl sets PCI_BUS_ID: in another order it can't know which card is "
             "cuda:0", "docs/cluster.md", ("NVIDIA GPU",)),
    Variable(
        "OMP_NUM_THREADS", "", "avoid", "`threads` in [nodes.NAME] sets the same and is recorded; nodes of one machine "
        "need fewer threads together than it has cores", "PyTorch: CPU threading", ("CPU",),
    ),
    Variable(
        "MLX_METAL_FAST_SYNCH", "", "avoid",
        "faster, but it can block the GPU until a restart, so MLX no longer suggests it",
        "ml-explore/mlx issues 3142 and 3830, pull request 4005", ("Apple GPU",),
    ),
    Variable(
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO", "", "avoid",
        "0.0 removes torch's memory limit on mps, and macOS then ends the process; MLX ignores it",
        "PyTorch: MPS environment variables", ("Apple GPU",),
    ),
    Variable("CUDA_LAUNCH_BLOCKING", "", "avoid", "1 makes every call wait for its kernel: for debugging only",
             "PyTorch: CUDA environment variables", ("NVIDIA GPU",)),
    Variable("MLX_DISABLE_COMPILE", "", "avoid", "any value, even 0, turns off MLX's compiler", _MLX, ("Apple GPU",)),
    Variable("MLX_METAL_PREALLOCATE", "", "no effect", "no MLX release reads it", _MLX, ("Apple GPU",)),
    Variable("MLX_MAX_MEMORY_GB", "", "no effect",
             "no MLX release reads it: set memory_limit_gb in [nodes.NAME]", _MLX, ("Apple GPU",)),
    Variable("MLX_BUFFER_CACHE_LIMIT", "", "no effect",
             "MLX doesn't read it: `defragment_every` in [run] clears its cache", _MLX, ("Apple GPU",)),
    Variable("MLX_ENABLE_TF32", "", "avoid", "it overrides `tf32` in [model]", "docs/training.md", ("Apple GPU",)),
    Variable("NVIDIA_TF32_OVERRIDE", "", "avoid", "it overrides `tf32` in [model]", "NVIDIA: cuBLAS", ("NVIDIA GPU",)),
    Variable("NCCL_SOCKET_IFNAME", "", "no effect",
             "trainctl sums by gloo or ring: set `interface` in [nodes.NAME]; the same holds for all of NCCL_*",
             "docs/cluster.md", ("NVIDIA GPU",)),
    Variable("TOKENIZERS_PARALLELISM", "", "no effect", "trainctl tokenizes in processes of its own, and sets it",
             "docs/data.md"),
    Variable("MASTER_ADDR", "", "no effect", "torchrun's, as MASTER_PORT, RANK and WORLD_SIZE: trainctl sets its own",
             "docs/cluster.md"),
)  # fmt: skip


def variables_for(platforms: Collection[Platform]) -> tuple[Variable, ...]:
    """Those that matter on any of these platforms; what to set comes first."""
    wanted = [one for one in VARIABLES if set(one.platforms) & set(platforms)]
    return tuple(sorted(wanted, key=lambda one: ("set", "avoid", "no effect").index(one.use)))


def platform_of(system: str, device: str) -> Platform:
    """Of a node's device as its driver reports it."""
    if "nvidia" in device.lower() or device.startswith("cuda"):
        return "NVIDIA GPU"
    return "Apple GPU" if system == "Darwin" or "apple" in device.lower() else "CPU"
