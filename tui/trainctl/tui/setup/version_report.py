"""Versions of what is installed, for a bug report: no name, path or address of the machine."""

import platform
import re
from importlib.metadata import distribution
from typing import Final

from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.messages.base import PROTOCOL_VERSION

_LIBRARIES: Final = (
    "torch", "mlx", "mlx-lm", "transformers", "peft", "accelerate", "safetensors", "bitsandbytes", "numpy", "textual",
    "rich", "typer", "pyzmq", "msgpack", "msgspec", "psutil", "setproctitle", "platformdirs", "tomli-w",
    "nvidia-ml-py", "pyarrow", "zstandard", "prometheus-client", "tensorboardX", "wandb", "zeroconf",
)  # fmt: skip
_NUMBERS = re.compile(r"\d+(\.\d+)*")
"""Of a kernel's release: what follows the numbers may name a host or its owner."""


def short() -> str:
    """`trainctl 0.3.0.dev0`."""
    return f"trainctl {_version('trainctl')}"


def full() -> str:
    """One `name value` pair per line: trainctl, its protocol and records, Python, system, libraries, devices."""
    import zmq  # the library below pyzmq, whose version decides about encryption

    from trainctl.protocol.machine.devices import read_devices
    from trainctl.protocol.machine.nvidia import without_cards
    from trainctl.protocol.record.schema import SCHEMA_VERSION

    pairs = [
        ("installed", _kind()), ("protocol", str(PROTOCOL_VERSION)),
        ("records", str(SCHEMA_VERSION)), ("python", f"{platform.python_version()} {platform.python_implementation()}"),
        ("system", _system()), ("libzmq", zmq.zmq_version()),
    ]  # fmt: skip
    pairs += [(name, found) for name in _LIBRARIES if (found := installed_version(name))]
    seen = without_cards(read_devices())
    pairs += [("device", f"{one.backend} {one.device} {' '.join(one.types)}".strip()) for one in seen]
    return "\n".join([short(), *(f"{name} {value}" for name, value in pairs)])


def _version(project: str) -> str:
    return installed_version(project) or "(not installed)"


def _kind() -> str:
    """How trainctl is installed."""
    if not installed_version("trainctl"):
        return "no"
    return "editable" if '"editable"' in (distribution("trainctl").read_text("direct_url.json") or "") else "packages"


def _system() -> str:
    mac = platform.mac_ver()[0]
    release = _NUMBERS.match(platform.release())
    return " ".join([platform.system(), mac or (release[0] if release else ""), platform.machine()])
