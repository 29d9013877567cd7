"""Environment variables that matter to a rank: the meaning of those that are set, for `doctor`, and advice on setting
them, for `advise`. Pure."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

Platform = Literal["Apple GPU", "NVIDIA GPU", "CPU"]
ALL: Final[tuple[Platform, ...]] = ("Apple GPU", "NVIDIA GPU", "CPU")


class Variable(msgspec.Struct, frozen=True):
    """An environment variable and the advice on it."""

    name: str
    value: str  # to set; empty: leave it unset
    use: Literal["set", "no effect", "avoid"]
    text: str
    source: str  # where that is stated
    platforms: tuple[Platform, ...] = ALL


_MLX: Final = "MLX: usage/environment_variables"
VARIABLES: Final = (
    Variable(
        "PYTORCH_ALLOC_CONF",
        "expandable_segments:True",
        "set",
        "less memory is lost between samples of unequal lengths; PYTORCH_CUDA_ALLOC_CONF is its old name",
        "PyTorch: CUDA environment variables, memory management",
        ("NVIDIA GPU",),
    ),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "0",
        "set",
        "for one node per GPU, each with its own number, as nvidia-smi numbers them",
        "PyTorch: CUDA semantics",
        ("NVIDIA GPU",),
    ),
    Variable(
        "CUDA_DEVICE_ORDER",
        "",
        "avoid",
        "trainctl sets PCI_BUS_ID: in another order it can't know which card is cuda:0",
        "docs/cluster.md",
        ("NVIDIA GPU",),
    ),
    Variable(
        "OMP_NUM_THREADS",
        "",
        "avoid",
        "`threads` in [nodes.NAME] sets the same and is recorded; nodes of one machine "
        "need fewer threads together than it has cores",
        "PyTorch: CPU threading",
        ("CPU",),
    ),
    Variable(
        "MLX_METAL_FAST_SYNCH",
        "",
        "avoid",
        "faster, but it can block the GPU until a restart, so MLX no longer suggests it",
        "ml-explore/mlx issues 3142 and 3830, pull request 4005",
        ("Apple GPU",),
    ),
    Variable(
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
        "",
        "avoid",
        "0.0 removes torch's memory limit on mps, and macOS then ends the process; MLX ignores it",
        "PyTorch: MPS environment variables",
        ("Apple GPU",),
    ),
    Variable(
        "CUDA_LAUNCH_BLOCKING",
        "",
        "avoid",
        "1 makes every call wait for its kernel: for debugging only",
        "PyTorch: CUDA environment variables",
        ("NVIDIA GPU",),
    ),
    Variable("MLX_DISABLE_COMPILE", "", "avoid", "any value, even 0, turns off MLX's compiler", _MLX, ("Apple GPU",)),
    Variable(
        "MLX_METAL_PREALLOCATE",
        "",
        "no effect",
        "no MLX release reads it: set memory_limit_gb in [nodes.NAME]",
        _MLX,
        ("Apple GPU",),
    ),
    Variable(
        "MLX_MAX_MEMORY_GB",
        "",
        "no effect",
        "no MLX release reads it: set memory_limit_gb in [nodes.NAME]",
        _MLX,
        ("Apple GPU",),
    ),
    Variable(
        "MLX_BUFFER_CACHE_LIMIT",
        "",
        "no effect",
        "MLX doesn't read it: `defragment_every` in [run] clears its cache",
        _MLX,
        ("Apple GPU",),
    ),
    Variable("MLX_ENABLE_TF32", "", "avoid", "it overrides `tf32` in [model]", "docs/training.md", ("Apple GPU",)),
    Variable("NVIDIA_TF32_OVERRIDE", "", "avoid", "it overrides `tf32` in [model]", "NVIDIA: cuBLAS", ("NVIDIA GPU",)),
    Variable(
        "NCCL_SOCKET_IFNAME",
        "",
        "no effect",
        "trainctl sums by gloo or ring: set `interface` in [nodes.NAME]; the same holds for all of NCCL_*",
        "docs/cluster.md",
        ("NVIDIA GPU",),
    ),
    Variable(
        "TOKENIZERS_PARALLELISM",
        "",
        "no effect",
        "trainctl tokenizes in processes of its own, and sets it",
        "docs/data.md",
    ),
    Variable(
        "MASTER_ADDR",
        "",
        "no effect",
        "torchrun's, as MASTER_PORT, RANK and WORLD_SIZE: trainctl sets its own",
        "docs/cluster.md",
    ),
)


@dataclass(frozen=True)
class Meaning:
    """The meaning of an environment variable that is set."""

    level: Literal["ok", "warn"]
    text: str
    do: str = ""


_UNSET = "unset it"
_NCCL = "is passed to trainers, but has no effect on trainctl's sums, which use gloo or MLX's ring"
_JACCL = "is never used: trainctl sums with gloo or MLX's ring, not with jaccl"
MEANINGS: Final[dict[str, Meaning]] = {
    **{one.name: Meaning("warn", one.text, _UNSET) for one in VARIABLES if one.use != "set"},
    "MKL_NUM_THREADS": Meaning("ok", "sets the threads of torch's matrix library; MLX ignores it"),
    "OPENBLAS_NUM_THREADS": Meaning("ok", "sets the threads of NumPy's matrix library, and of MLX's on a Linux CPU"),
    "VECLIB_MAXIMUM_THREADS": Meaning("ok", "sets the threads of macOS's CPU matrix library; MLX ignores it"),
    "CUDA_VISIBLE_DEVICES": Meaning(
        "ok", "torch sees only these devices, and `device` in the run file counts only them; MLX on Metal ignores it"
    ),
    "PYTORCH_ALLOC_CONF": Meaning("ok", "configures torch's CUDA allocator; MLX ignores it"),
    "PYTORCH_CUDA_ALLOC_CONF": Meaning("ok", "configures torch's CUDA allocator; MLX ignores it"),
    "PYTORCH_ENABLE_MPS_FALLBACK": Meaning(
        "ok", "torch on mps uses the CPU for operations that Metal lacks; MLX ignores it"
    ),
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": Meaning(
        "ok", "limits torch's memory on mps; MLX ignores it: for an MLX rank, set memory_limit_gb in [nodes.X]"
    ),
    "MLX_HOSTFILE": Meaning("warn", "this value is never used: trainctl sets its own for each group", _UNSET),
    "MLX_RANK": Meaning("warn", "this value is never used: trainctl sets its own for each group", _UNSET),
    "GLOO_SOCKET_IFNAME": Meaning(
        "warn",
        "this value is never used: trainctl sets its own from `interface` in [nodes.X]",
        "name the interface in the run file",
    ),
    "NCCL_IB_DISABLE": Meaning("ok", f"turns off InfiniBand in NCCL; it {_NCCL}"),
    "NCCL_NET_GDR_LEVEL": Meaning(
        "ok", f"sets how far apart a GPU and a network card may be for NCCL to copy between them directly; it {_NCCL}"
    ),
    "NCCL_P2P_DISABLE": Meaning("ok", f"turns off copies between GPUs in NCCL; it {_NCCL}"),
    "NCCL_DEBUG": Meaning("ok", f"sets what NCCL logs; it {_NCCL}"),
    "CUBLAS_WORKSPACE_CONFIG": Meaning(
        "ok", "sets cuBLAS's working memory; `deterministic` in [nodes.X] sets it to :4096:8 where it is unset"
    ),
    "MLX_JACCL_COORDINATOR": Meaning("warn", _JACCL, _UNSET),
    "MLX_IBV_DEVICES": Meaning("warn", _JACCL, _UNSET),
    "MASTER_PORT": Meaning("warn", "belongs to torchrun; trainctl ignores it", _UNSET),
    "RANK": Meaning("warn", "belongs to torchrun; trainctl ignores it and numbers ranks itself", _UNSET),
    "WORLD_SIZE": Meaning("warn", "belongs to torchrun; trainctl ignores it and counts nodes itself", _UNSET),
    "LD_PRELOAD": Meaning("warn", "is loaded into every trainer and reducer", "unset it unless you need that"),
    "DYLD_INSERT_LIBRARIES": Meaning(
        "warn", "is loaded into every trainer and reducer", "unset it unless you need that"
    ),
}
"""Variables that change, or may change, how a rank computes: agents report those that are set."""
_SWITCHES: Final = {
    "NCCL_IB_DISABLE": f"leaves InfiniBand on in NCCL; it {_NCCL}",
    "NCCL_P2P_DISABLE": f"leaves copies between GPUs on in NCCL; it {_NCCL}",
    "PYTORCH_ENABLE_MPS_FALLBACK": "torch on mps refuses operations that Metal lacks; MLX ignores it",
    "CUDA_LAUNCH_BLOCKING": "CUDA calls don't wait for their kernels, as without it",
}
"""Variables that 0 turns off, with what that means."""


def meaning_of(name: str, value: str) -> Meaning | None:
    """Return the meaning of a variable that is set to a value; None of one that isn't in the table."""
    if name == "PYTORCH_MPS_HIGH_WATERMARK_RATIO" and value.strip() in ("0", "0.0"):
        return Meaning("warn", "torch on mps uses memory without limit until macOS kills it; MLX ignores this", _UNSET)
    if name in _SWITCHES and value.strip() == "0":
        return Meaning("ok", _SWITCHES[name])
    return MEANINGS.get(name)


def variables_for(platforms: Collection[Platform]) -> tuple[Variable, ...]:
    """Return the variables that matter on any of these platforms; what to set comes first."""
    wanted = [one for one in VARIABLES if set(one.platforms) & set(platforms)]
    return tuple(sorted(wanted, key=lambda one: ("set", "avoid", "no effect").index(one.use)))


def platform_of(system: str, device: str) -> Platform:
    """Return the platform of a node's device as its driver reports it."""
    if "nvidia" in device.lower() or device.startswith("cuda"):
        return "NVIDIA GPU"
    return "Apple GPU" if system == "Darwin" or "apple" in device.lower() else "CPU"
