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
_THREADS = "torch's CPU threads; MLX doesn't read it, and threads in [nodes.X] of the run file goes before it"
MEANINGS: dict[str, Meaning] = {
    "OMP_NUM_THREADS": Meaning("ok", _THREADS),
    "MKL_NUM_THREADS": Meaning("ok", "threads of torch's matrix library; MLX doesn't read it"),
    "OPENBLAS_NUM_THREADS": Meaning("ok", "threads of NumPy's matrix library, and of MLX's on a Linux CPU"),
    "VECLIB_MAXIMUM_THREADS": Meaning("ok", "threads of macOS's matrix library on the CPU; MLX itself doesn't read it"),
    "CUDA_VISIBLE_DEVICES": Meaning("ok", "torch sees these devices alone, and `device` in the run file counts them; "
                                    "MLX on Metal doesn't read it"),
    "CUDA_LAUNCH_BLOCKING": Meaning("warn", "makes every CUDA kernel wait: for debugging only", _UNSET),
    "PYTORCH_CUDA_ALLOC_CONF": Meaning("ok", "torch's CUDA allocator; MLX doesn't read it"),
    "PYTORCH_ENABLE_MPS_FALLBACK": Meaning("ok", "torch on mps does what Metal lacks on the CPU; MLX doesn't read it"),
    "PYTORCH_MPS_HIGH_WATERMARK_RATIO": Meaning("ok", "torch's limit on mps; MLX doesn't read it: for an MLX rank set "
                                                "memory_limit_gb in [nodes.X]"),
    "MLX_METAL_FAST_SYNCH": Meaning("warn", "faster waits for Metal, documented to wedge some GPUs",
                                    "unset it if a rank hangs"),
    "MLX_METAL_PREALLOCATE": Meaning("warn", "MLX reads no such variable: it changes nothing",
                                     "unset it; memory_limit_gb in [nodes.X] sets a rank's memory"),
    "MLX_DISABLE_COMPILE": Meaning("warn", "MLX compiles nothing: slower steps, for debugging only", _UNSET),
    "MLX_HOSTFILE": Meaning("warn", "set anew for each group by trainctl: this value is never used", _UNSET),
    "MLX_RANK": Meaning("warn", "set anew for each group by trainctl: this value is never used", _UNSET),
    "GLOO_SOCKET_IFNAME": Meaning("warn", "set by trainctl from `interface` in [nodes.X]: this value is never used",
                                  "name the interface in the run file"),
    "NCCL_SOCKET_IFNAME": Meaning("warn", "nothing here sums over NCCL: it changes nothing",
                                  "name the interface in [nodes.X] of the run file"),
    "MASTER_ADDR": Meaning("warn", "of torchrun; trainctl doesn't read it", _UNSET),
    "MASTER_PORT": Meaning("warn", "of torchrun; trainctl doesn't read it", _UNSET),
    "RANK": Meaning("warn", "of torchrun; trainctl numbers ranks by the run file and doesn't read it", _UNSET),
    "WORLD_SIZE": Meaning("warn", "of torchrun; trainctl counts the run file's nodes and doesn't read it", _UNSET),
    "LD_PRELOAD": Meaning("warn", "loaded into every trainer and reducer", "unset it unless that is meant"),
    "DYLD_INSERT_LIBRARIES": Meaning("warn", "loaded into every trainer and reducer", "unset it unless that is meant"),
}  # fmt: skip


def of_environment(look: Look, facts: m.Facts) -> Iterator[Finding]:
    """A line for each variable that is set; they are the agent's, and its trainers inherit them."""
    for name, value in facts.environment.items():
        if name in MEANINGS:
            meaning = _meaning(name, value)
            yield Finding(meaning.level, look.name, "environment", f"{name}={value}: {meaning.text}", meaning.do)


def _meaning(name: str, value: str) -> Meaning:
    if name == "PYTORCH_MPS_HIGH_WATERMARK_RATIO" and value.strip() in ("0", "0.0"):
        return Meaning("warn", "torch on mps takes memory without limit, until macOS kills; MLX doesn't read it",
                       _UNSET)  # fmt: skip
    return MEANINGS[name]
