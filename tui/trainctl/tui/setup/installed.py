"""The installation: versions for a bug report, without names, paths or addresses of the machine; and the pages of the
documentation, beside the program in an installed package, at the root of a checkout."""

import platform
import re
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Final

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.messages.base import PROTOCOL_VERSION

_LIBRARIES: Final = (
    "torch",
    "mlx",
    "mlx-lm",
    "transformers",
    "peft",
    "accelerate",
    "safetensors",
    "bitsandbytes",
    "numpy",
    "textual",
    "rich",
    "typer",
    "pyzmq",
    "msgpack",
    "msgspec",
    "psutil",
    "setproctitle",
    "platformdirs",
    "tomli-w",
    "nvidia-ml-py",
    "pyarrow",
    "zstandard",
    "prometheus-client",
    "tensorboardX",
    "wandb",
    "zeroconf",
)
_NUMBERS = re.compile(r"\d+(\.\d+)*")
"""The numbers of a kernel's release: what follows the numbers may name a host or its owner."""


def versions() -> str:
    """Return one `name value` pair per line: trainctl, its protocol and records, Python, system, libraries, devices."""
    import zmq  # the library below pyzmq, whose version decides about encryption

    from trainctl.protocol.machine.devices import read_devices
    from trainctl.protocol.machine.nvidia import without_cards
    from trainctl.protocol.record.schema import SCHEMA_VERSION

    pairs = [
        ("installed", _kind()),
        ("protocol", str(PROTOCOL_VERSION)),
        ("records", str(SCHEMA_VERSION)),
        ("python", f"{platform.python_version()} {platform.python_implementation()}"),
        ("system", _system()),
        ("libzmq", zmq.zmq_version()),
    ]
    pairs += [(name, found) for name in _LIBRARIES if (found := installed_version(name))]
    seen = without_cards(read_devices())
    pairs += [("device", f"{one.backend} {one.device} {' '.join(one.types)}".strip()) for one in seen]
    return "\n".join([f"trainctl {installed_version('trainctl')}", *(f"{name} {value}" for name, value in pairs)])


def _kind() -> str:
    """Return how trainctl is installed."""
    if not installed_version("trainctl"):
        return "no"
    return "editable" if '"editable"' in (distribution("trainctl").read_text("direct_url.json") or "") else "packages"


def _system() -> str:
    mac = platform.mac_ver()[0]
    release = _NUMBERS.match(platform.release())
    return " ".join([platform.system(), mac or (release[0] if release else ""), platform.machine()])


INSTALLED = "docs"
"""The folder in this package that the wheel puts the pages into."""
_INDEX = "README.md"
"""The page that lists the others with a line about each."""
_ROW = re.compile(r"^\| \[([a-z-]+)\.md\]\(\1\.md\) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Page:
    """One page: its topic, what it is about, and its file in Markdown."""

    topic: str
    about: str
    path: Path


def folder() -> Path:
    """Return the folder of the pages. Raises InvalidInputError if the installation has none."""
    package = Path(__file__).resolve().parents[1]
    for found in (package / INSTALLED, package.parents[2] / "docs"):
        if (found / _INDEX).is_file():
            return found
    raise InvalidInputError("help", "the documentation isn't installed: reinstall trainctl with pip")


def pages() -> dict[str, Page]:
    """Return the pages by topic, in the order of the index. Raises InvalidInputError if the installation has none."""
    place = folder()
    rows = _ROW.findall((place / _INDEX).read_text("utf-8"))
    return {
        topic: Page(topic, _LINK.sub(r"\1", about).replace("`", ""), place / f"{topic}.md") for topic, about in rows
    }


def schema(name: str) -> Path:
    """Return the JSON Schema of run.toml, cluster.toml or config.toml: `run`, `cluster` or `config`. Raises
    InvalidInputError if the installation has none."""
    return folder() / f"{name}.schema.json"


def files() -> list[Path]:
    """Return every file that an installation needs for its help: the index, the pages, and the schemas of TOML
    files."""
    return sorted([*folder().glob("*.md"), *map(schema, ("run", "cluster", "config"))])
