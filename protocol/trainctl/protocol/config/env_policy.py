"""Which environment variables a run file may give a trainer: those of its libraries, not those that choose its code.

Permission to start a run isn't permission to run other programs on a node. So variables that set where the system's
loader, Python or a library finds code come only from the node's own environment (`trainctl-agent install --env`). A
run file can't set the variables either that trainctl, its engines and the agent's service manager set, nor those that
only look as if they chose a network interface.
"""

import re
from collections.abc import Mapping

from trainctl.protocol.errors import InvalidInputError

AGENT_OPTIONS = "TRAINCTL_AGENT_"
"""How the variables begin that set the options of `trainctl-agent run`."""
DEVICE_ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_VARIABLES = 64
MOST_BYTES = 4000
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
_CODE = re.compile(
    r"PYTHON.*|LD_.*|DYLD_.*|PATH|HOME|SHELL|ENV|BASH_ENV|IFS|GCONV_PATH|GLIBC_TUNABLES|CC|CXX|XDG_.*|TMPDIR|RSYNC_.*"
    r"|.*(PRELOAD|PLUGIN|INJECTION|LIBRAR|LIB_PATH|LIBPATH|EXTENSION|AUDIT|_DLL|MODULES?_|COMPILER).*"
)


def check(variables: Mapping[str, str], where: str) -> None:
    """Whether a trainer may be given these. Raises InvalidInputError naming `where` and the variable."""
    if len(variables) > MOST_VARIABLES:
        raise InvalidInputError(where, f"{len(variables)} variables are too many; the maximum is {MOST_VARIABLES}")
    for name, value in variables.items():
        check_name(name, where)
        check_value(value, f"{where}.{name}")
        if problem := next((why for names, why in _RESERVED if re.fullmatch(names, name)), None):
            raise InvalidInputError(f"{where}.{name}", problem)
        if _CODE.fullmatch(name):
            problem = "controls which code runs; set it on the node with: trainctl-agent install --env"
            raise InvalidInputError(f"{where}.{name}", problem)


def without_agent_options(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for processes that an agent or a demo starts: another agent among them must not take the options
    of this machine's, and no trainer needs what may be secret in them, such as the address of a webhook."""
    return {name: value for name, value in environment.items() if not name.startswith(AGENT_OPTIONS)}


def of_trainers(environment: Mapping[str, str], wanted: Mapping[str, str]) -> dict[str, str]:
    """That of processes that train, score or calibrate: the agent's, with a run file's variables laid over it. CUDA
    numbers devices as their driver and nvidia-smi do, so that readings and data types are those of the same card."""
    ours = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", DEVICE_ORDER: BY_BUS}
    return {**without_agent_options(environment), **ours, **wanted}


def check_name(name: str, where: str) -> None:
    """Raises InvalidInputError for text that can't be a variable's name."""
    if not _NAME.fullmatch(name):
        raise InvalidInputError(where, f"{name[:40]!r} is not a variable name: use letters, digits and '_'")


def check_value(value: str, where: str) -> None:
    """Raises InvalidInputError for text that can't be a variable's value."""
    if "\0" in value or len(value.encode(errors="replace")) > MOST_BYTES:
        raise InvalidInputError(where, f"must be text of at most {MOST_BYTES} bytes, without null bytes")
