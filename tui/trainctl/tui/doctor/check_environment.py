"""What the environment variables that people set for training do here, and which of them MLX or trainctl never read."""

from collections.abc import Iterator
from typing import NamedTuple

from trainctl.protocol import messages as m
from trainctl.tui.doctor.findings import Finding, Level, Look


class Meaning(NamedTuple):
    """What is said of a variable that is set."""

    level: Level
    text: str
    do: str = ""


_UNSET = "unset it"
_NCCL = "is passed to trainers, but has no effect on trainctl's sums, which use gloo or MLX's ring"
_JACCL = "is never used: trainctl sums with gloo or MLX's ring, not with jaccl"
_THREADS = "sets torch's CPU threads (threads in the run file's [nodes.X] overrides it); MLX ignores it"
MEANINGS: dict[str, Meaning] = {
    "OMP_NUM_THREADS": Meaning("warn", _THREADS, "unset it, and set threads in [nodes.X]"),
    "MKL_NUM_THREADS": Meaning("ok", "sets the threads of torch's matrix library; MLX ignores it"),
    "OPENBLAS_NUM_THREADS": Meaning("ok", "sets the threads of NumPy's matrix library, and of MLX's on a Linux CPU"),
    "VECLIB_MAXIMUM_THREADS": Meaning("ok", "sets the threads of macOS's CPU matrix library; MLX ignores it"),
    "CUDA_VISIBLE_DEVICES": Meaning("ok", "torch sees only these devices, and `device` in the run file counts only "
    "them; MLX on Metal ignores it"),
    "CUDA_LAUNCH_BLOCKING": Meaning("warn", "makes every CUDA call wait for its kernel: for debugging only", _UNSET),
    "PYTORCH_ALLOC_CONF": Meaning("ok", "configures torch's CUDA allocator; MLX ignores it"),
    "PYTORCH_CUDA_ALLOC_CONF": Meaning("ok", "configures torch's CUDA allocator; MLX ignores it"),
    "PYTORCH_ENABLE_MPS_FALLBACK": Meaning("ok", "torch on mps uses the CPU for operations that Metal lacks; MLX "
    "ignores it"),
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": Meaning("ok", "limits torch's memory on mps; MLX ignores it: for an MLX rank, "
    "set memory_limit_gb in [nodes.X]"),
    "MLX_METAL_FAST_SYNCH": Meaning("warn", "speeds up waiting for Metal, but is documented to hang some GPUs",
                                    "unset it if a rank hangs"),
    "MLX_METAL_PREALLOCATE": Meaning("warn", "has no effect: MLX has no such variable",
                                     "unset it; to limit a rank's memory, use memory_limit_gb in [nodes.X]"),
    "MLX_DISABLE_COMPILE": Meaning("warn", "turns off MLX's compiler, so steps are slower: for debugging only", _UNSET),
    "MLX_HOSTFILE": Meaning("warn", "this value is never used: trainctl sets its own for each group", _UNSET),
    "MLX_RANK": Meaning("warn", "this value is never used: trainctl sets its own for each group", _UNSET),
    "GLOO_SOCKET_IFNAME": Meaning("warn", "this value is never used: trainctl sets its own from "
                                  "`interface` in [nodes.X]", "name the interface in the run file"),
    "NCCL_SOCKET_IFNAME": Meaning("warn", "has no effect: trainctl doesn't sum over NCCL",
                                  "name the interface in [nodes.X] of the run file"),
    "NCCL_IB_DISABLE": Meaning("ok", f"turns off InfiniBand in NCCL; it {_NCCL}"),
    "NCCL_NET_GDR_LEVEL": Meaning("ok", "sets how far apart a GPU and a network card may be for NCCL to copy between "
                                  f"them directly; it {_NCCL}"),
    "NCCL_P2P_DISABLE": Meaning("ok", f"turns off copies between GPUs in NCCL; it {_NCCL}"),
    "NCCL_DEBUG": Meaning("ok", f"sets what NCCL logs; it {_NCCL}"),
    "NVIDIA_TF32_OVERRIDE": Meaning("warn", "0 forbids TF32 to NVIDIA's libraries, whatever tf32 in [model] says",
                                    "unset it, and set tf32 in the run file"),
    "MLX_ENABLE_TF32": Meaning("warn", "decides whether MLX uses TF32, whatever tf32 in [model] says",
                               "unset it, and set tf32 in the run file"),
    "CUBLAS_WORKSPACE_CONFIG": Meaning("ok", "sets cuBLAS's working memory; `deterministic` in [nodes.X] sets it to "
                                       ":4096:8 where it is unset"),
    "MLX_JACCL_COORDINATOR": Meaning("warn", _JACCL, _UNSET),
    "MLX_IBV_DEVICES": Meaning("warn", _JACCL, _UNSET),
    "MASTER_ADDR": Meaning("warn", "belongs to torchrun; trainctl ignores it", _UNSET),
    "MASTER_PORT": Meaning("warn", "belongs to torchrun; trainctl ignores it", _UNSET),
    "RANK": Meaning("warn", "belongs to torchrun; trainctl ignores it and numbers ranks itself", _UNSET),
    "WORLD_SIZE": Meaning("warn", "belongs to torchrun; trainctl ignores it and counts nodes itself", _UNSET),
    "LD_PRELOAD": Meaning("warn", "is loaded into every trainer and reducer", "unset it unless you need that"),
    "DYLD_INSERT_LIBRARIES": Meaning("warn", "is loaded into every trainer and reducer",
                                     "unset it unless you need that"),
}  # fmt: skip


_SWITCHES = {
    "NCCL_IB_DISABLE": f"leaves InfiniBand on in NCCL; it {_NCCL}",
    "NCCL_P2P_DISABLE": f"leaves copies between GPUs on in NCCL; it {_NCCL}",
    "PYTORCH_ENABLE_MPS_FALLBACK": "torch on mps refuses operations that Metal lacks; MLX ignores it",
    "CUDA_LAUNCH_BLOCKING": "CUDA calls don't wait for their kernels, as without it",
}
"""Variables that 0 turns off, with what that means."""


def of_environment(look: Look, facts: m.Facts) -> Iterator[Finding]:
    """A line for each variable that is set; they are the agent's, and its trainers inherit them."""
    for name, value in facts.environment.items():
        if name in MEANINGS:
            meaning = _meaning(name, value)
            yield Finding(meaning.level, look.name, "environment", f"{name}={value}: {meaning.text}", meaning.do)


def _meaning(name: str, value: str) -> Meaning:
    if name == "PYTORCH_MPS_HIGH_WATERMARK_RATIO" and value.strip() in ("0", "0.0"):
        return Meaning("warn", "torch on mps uses memory without limit until macOS kills it; MLX ignores this",
                       _UNSET)  # fmt: skip
    if name in _SWITCHES and value.strip() == "0":
        return Meaning("ok", _SWITCHES[name])
    return MEANINGS[name]
