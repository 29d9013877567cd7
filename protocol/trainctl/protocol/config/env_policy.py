"""The environment variables that a run file may give a node's trainers, and the environment that they get.

Permission to start a run isn't permission to run other programs on a node. Too many variables choose where the system's
loader, a compiler or a library finds code, so only those in a list are taken from a run file. All others come from the
node's own environment (`trainctl-agent install --env`), or its owner allows them there.
"""

import re
from collections.abc import Collection, Mapping

from trainctl.protocol.errors import InvalidInputError

AGENT_OPTIONS = "TRAINCTL_AGENT_"
"""Prefix of the variables that set the options of `trainctl-agent run`."""
DEVICE_ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
VISIBLE = "CUDA_VISIBLE_DEVICES"
MAX_VARIABLES = 64
MAX_BYTES = 4000
"""Most bytes of one value."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_RESERVED = (
    (r"TRAINCTL_.*|GLOO_SOCKET_IFNAME|MLX_RANK|MLX_HOSTFILE", "is reserved because trainctl sets it"),
    (
        r"NCCL_SOCKET_IFNAME|MLX_(WORLD_SIZE|IBV_DEVICES|JACCL_COORDINATOR)",
        "would have no effect: it is for an engine that trainctl doesn't offer (nccl, jaccl). For gloo and ring, name "
        "the network interface with `interface` in [nodes.NAME]",
    ),
    (r"RANK|LOCAL_RANK|WORLD_SIZE|MASTER_(ADDR|PORT)", "belongs to torchrun: trainctl numbers ranks itself"),
    (r"NOTIFY_SOCKET|WATCHDOG_.*|LISTEN_.*", "belongs to the service manager of the node's agent"),
)
"""Variables that a trainer must not be given, and why."""
ALLOWED = frozenset(
    {
        # threads
        "OMP_NUM_THREADS",
        "OMP_PROC_BIND",
        "OMP_PLACES",
        "OMP_WAIT_POLICY",
        "GOMP_CPU_AFFINITY",
        "KMP_AFFINITY",
        "KMP_BLOCKTIME",
        "MKL_NUM_THREADS",
        "MKL_DYNAMIC",
        "OPENBLAS_NUM_THREADS",
        "VECLIB_MAXIMUM_THREADS",
        "RAYON_NUM_THREADS",
        "TOKENIZERS_PARALLELISM",
        "MALLOC_ARENA_MAX",
        # devices, and what they compute with
        VISIBLE,
        DEVICE_ORDER,
        "HIP_VISIBLE_DEVICES",
        "ROCR_VISIBLE_DEVICES",
        "CUDA_LAUNCH_BLOCKING",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_MODULE_LOADING",
        "CUBLAS_WORKSPACE_CONFIG",
        "NVIDIA_TF32_OVERRIDE",
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        "ATEN_CPU_CAPABILITY",
        "ONEDNN_MAX_CPU_ISA",
        "DNNL_MAX_CPU_ISA",
        "MLX_ENABLE_TF32",
        "MLX_DISABLE_COMPILE",
        "TORCHDYNAMO_DISABLE",
        # memory
        "PYTORCH_ALLOC_CONF",
        "PYTORCH_CUDA_ALLOC_CONF",
        "PYTORCH_NO_CUDA_MEMORY_CACHING",
        "PYTORCH_MPS_HIGH_WATERMARK_RATIO",
        "PYTORCH_MPS_LOW_WATERMARK_RATIO",
        "PYTORCH_ENABLE_MPS_FALLBACK",
        "PYTORCH_MPS_PREFER_METAL",
        "PYTORCH_MPS_FAST_MATH",
        "MLX_METAL_FAST_SYNCH",
        "MLX_METAL_PREALLOCATE",
        "MLX_MAX_OPS_PER_BUFFER",
        "MLX_MAX_MB_PER_BUFFER",
        # what is logged, and engines that are only named
        "NCCL_DEBUG",
        "NCCL_IB_DISABLE",
        "NCCL_P2P_DISABLE",
        "NCCL_NET_GDR_LEVEL",
        "TORCH_SHOW_CPP_STACKTRACES",
    }
)
"""Variables that a run file may give a node's processes: none names a file, a program or a library."""
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
ALLOWED_BY_OWNER = "TRAINCTL_ALLOWED_VARIABLES"
"""The agent's variable in which a machine's owner names more of them, separated by commas."""


def check(variables: Mapping[str, str], where: str) -> None:
    """Raise InvalidInputError naming `where` and the variable if no node would take these from a run file."""
    if len(variables) > MAX_VARIABLES:
        raise InvalidInputError(where, f"{len(variables)} variables are too many; the maximum is {MAX_VARIABLES}")
    for name, value in variables.items():
        check_name(name, where)
        check_value(value, f"{where}.{name}")
        if problem := next((why for names, why in _RESERVED if re.fullmatch(names, name)), None):
            raise InvalidInputError(f"{where}.{name}", problem)


def check_allowed(variables: Collection[str], environment: Mapping[str, str], where: str) -> None:
    """Raise InvalidInputError naming the first variable that a run file may not set on the node whose agent has this
    environment."""
    by_owner = {name.strip() for name in environment.get(ALLOWED_BY_OWNER, "").split(",")}
    for name in sorted({*variables} - ALLOWED - by_owner):
        problem = f"a run file may not set it: set it on the node with trainctl-agent install --env {name}=..., or "
        raise InvalidInputError(f"{where}.{name}", f"{problem}allow it there with --env {ALLOWED_BY_OWNER}={name}")


def omp_threads(environment: Mapping[str, str]) -> int:
    """Return the threads that OMP_NUM_THREADS sets, the first number of a list; 0 without a valid one."""
    first = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def without_agent_options(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that an agent or a demo starts: another agent among them must not take the options
    of this machine's, and no trainer needs what may be secret in them, such as the address of a webhook."""
    return {name: value for name, value in environment.items() if not name.startswith(AGENT_OPTIONS)}


def of_trainers(
    environment: Mapping[str, str], wanted: Mapping[str, str], where: str = "env", *, threads: int = 0
) -> dict[str, str]:
    """Return the environment of processes that train, score or calibrate: the agent's, with a run file's variables laid
    over it. `threads` (0: any number) is for matrix libraries whose number neither sets, such as that of MLX on a Linux
    CPU. CUDA numbers devices as their driver and nvidia-smi do, so that readings and data types are those of the same
    card. Raises InvalidInputError blaming `where` as `check_allowed` does."""
    check_allowed(wanted, environment, where)
    ours = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", DEVICE_ORDER: BY_BUS}
    shared = dict.fromkeys(_THREADS, str(threads)) if threads else {}
    return {**shared, **without_agent_options(environment), **ours, **wanted}


def check_name(name: str, where: str) -> None:
    """Raise InvalidInputError for text that can't be a variable's name."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(where, f"{name[:40]!r} is not a variable name: use letters, digits and '_'")


def check_value(value: str, where: str) -> None:
    """Raise InvalidInputError for text that can't be a variable's value."""
    if "\0" in value or len(value.encode(errors="replace")) > MAX_BYTES:
        raise InvalidInputError(where, f"must be text of at most {MAX_BYTES} bytes, without null bytes")
