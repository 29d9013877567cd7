"""The facts that a new run file and cluster file take from this machine: backends, memory, addresses, model and
data."""

import ipaddress
import json
import math
import platform
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from trainctl.protocol.batch.device_table import Preset, preset_of
from trainctl.protocol.client import local_agents
from trainctl.protocol.client.local_agents import LocalAgent
from trainctl.protocol.config import data_files, families, names
from trainctl.protocol.config.input_checks import PAIR_FIELDS
from trainctl.protocol.config.model_facts import ModelFacts, context_limit, read_facts, weight_files
from trainctl.protocol.config.run_tables import ComputeDtype, DataKind
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import nvidia

BACKENDS = ("torch", "mlx")
BYTES_PER_TOKEN = 4
"""Bytes of text per token, by the tokenizers of common models."""
PROMPT_CHARACTERS, ROW_CHARACTERS = 32, 1000
"""Characters of a text that are a prompt, and most of a row's prompt."""
_BYTES_OF_DTYPE = {"float32": 4, "float64": 8}


@dataclass(frozen=True)
class Interface:
    """An address of a network interface."""

    name: str
    address: str
    network: str  # 192.168.1.0/24, fd00::/64
    is_loopback: bool


@dataclass(frozen=True)
class ThisMachine:
    """This machine."""

    node: str  # the name it goes by in files
    backends: tuple[str, ...]  # of BACKENDS, those installed
    memory_bytes: int
    interfaces: tuple[Interface, ...]
    has_gpu: bool = False  # Metal or CUDA
    device_bytes: int = 0  # memory of its GPU; 0: not known, or that of the machine
    agents: tuple[LocalAgent, ...] = ()  # that run here
    preset: Preset | None = None  # of its first NVIDIA GPU

    @property
    def dtype(self) -> ComputeDtype:
        """The type that its device computes fastest in; bfloat16 for a GPU whose architecture isn't known."""
        if self.preset is not None:
            return self.preset.dtype
        return "bfloat16" if self.has_gpu else "float32"

    @property
    def backend(self) -> str:
        """The backend that a trainer here uses by default; empty without one."""
        prefers = "mlx" if sys.platform == "darwin" else "torch"
        return prefers if prefers in self.backends else "".join(self.backends[:1])

    def node_at(self, address: str) -> str:
        """Return the name of the agent that runs at an address here; without one, this machine's name."""
        return next((agent.node for agent in self.agents if agent.address == address), self.node)

    def interface_of(self, address: str) -> Interface | None:
        """Return the one that has an IP address."""
        return next((interface for interface in self.interfaces if interface.address == address), None)


@dataclass(frozen=True)
class Model:
    """A Hugging Face folder."""

    path: Path
    parameters: int  # by the size of its weights, of a quantized model by their shapes
    positions: int | None  # longest sequence, where its configuration tells
    has_tokenizer: bool
    facts: ModelFacts | None = None  # its sizes, where its configuration tells
    is_random: bool = False  # without weights: to be trained from scratch
    encodes_prompts: bool = False  # an encoder-decoder model

    @property
    def quantized_bytes(self) -> int:
        """The size of its packed weights; 0: they are whole."""
        return sum(self.facts.quantized.values()) if self.facts is not None else 0


def data_kind(path: Path) -> DataKind:
    """Return the kind of a file by its suffix and first line, of a folder or a glob by its files. Raises
    InvalidInputError for one that can't be read."""
    if path.is_dir() or data_files.is_glob(path):
        has_text, has_rows = (bool(data_files.data_files(path, kind)) for kind in ("text", "rows"))
        if not has_text and not has_rows and not path.is_dir():
            raise InvalidInputError("--data", f"{path} matches no *.txt, *.jsonl, *.ndjson or *.parquet file")
        return "rows" if has_rows and not has_text else "text"
    if path.suffix == ".parquet":
        return "rows"
    if path.suffix not in (".jsonl", ".ndjson", ".json"):
        return "text"
    try:
        found = _first_object(path)
    except (OSError, ValueError) as error:
        raise InvalidInputError("--data", f"{path}: line 1 is not a JSON object: {error}") from None
    return "samples" if isinstance(found, dict) and "tokens" in found else "rows"


def text_samples(path: Path, model: Model, length: int) -> int:
    """Return about how many samples text has, by its size: exactly as long as bytes are the tokens."""
    size = sum(file.stat().st_size for file in data_files.data_files(path, "text"))
    return max(1, size // ((BYTES_PER_TOKEN if model.has_tokenizer else 1) * length))


def prompt(path: Path, kind: DataKind) -> str:
    """Return the beginning of the first text, or the prompt of the first row; empty if there is none to show."""
    file = next(iter(data_files.data_files(path, kind)), None)
    if file is None or kind == "samples" or file.suffix == ".parquet":
        return ""
    try:
        if kind == "text":
            with file.open(encoding="utf-8") as source:
                words = source.read(4 * PROMPT_CHARACTERS).split()
            return " ".join(words)[: PROMPT_CHARACTERS + 1].rpartition(" ")[0] or " ".join(words)[:PROMPT_CHARACTERS]
        row = _first_object(file)
    except (OSError, ValueError):
        return ""  # what is wrong with it is found when all of it is read
    asked = row.get("prompt") if isinstance(row, dict) else None
    return asked if isinstance(asked, str) and 0 < len(asked) <= ROW_CHARACTERS else ""


def has_pairs(path: Path) -> bool:
    """Return whether the first file of row data has a chosen and a rejected answer: JSON lines in the first row,
    Parquet among its columns."""
    file = next(iter(data_files.data_files(path, "rows")), None)
    try:
        fields = set() if file is None else _columns(file) if file.suffix == ".parquet" else _fields(file)
    except (OSError, ValueError):
        return False  # what is wrong with it is found when all of it is read
    return fields.issuperset(PAIR_FIELDS)


def _fields(path: Path) -> set[str]:
    found = _first_object(path)
    return {name for name, value in found.items() if value is not None} if isinstance(found, dict) else set()


def _columns(path: Path) -> set[str]:
    try:
        import pyarrow.parquet
    except ImportError:
        return set()  # what reads the rows says that it is missing
    try:
        return {*pyarrow.parquet.read_schema(path).names}
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from None


def _first_object(path: Path) -> Any:
    """Return the first line that isn't empty. Raises OSError, or ValueError for one that isn't JSON."""
    with path.open("rb") as file:
        return json.loads(next((line for line in file if line.strip()), b"{}"))


def machine() -> ThisMachine:
    """This one, as it is now."""
    there = tuple(agent for cluster in local_agents.running() for agent in cluster)
    metal = sys.platform == "darwin" and platform.machine() == "arm64"
    cuda, cards = _cuda()
    known = nvidia.capabilities() if cuda else ()
    chosen = max(zip(known, cards, strict=False), key=lambda card: card[0], default=None)  # as a rank chooses
    return ThisMachine(
        names.node_name(),
        backends(),
        psutil.virtual_memory().total,
        interfaces(),
        metal or cuda > 0,
        cuda,
        there,
        preset_of(*chosen) if chosen is not None else None,
    )


def _cuda() -> tuple[int, list[str]]:
    """Memory of the smallest NVIDIA GPU here, and the names of all, as the driver says; 0 without one."""
    try:
        said = nvidia.nvidia_smi("memory.total", "name")
        cards = [line.partition(",") for line in said.splitlines() if line.strip()]
        return min(int(size) for size, _, _ in cards) * 2**20, [name.strip() for _, _, name in cards]
    except (OSError, ValueError, subprocess.SubprocessError):
        return 0, []


def backends() -> tuple[str, ...]:
    """Return those of BACKENDS that are installed."""
    return tuple(name for name in BACKENDS if find_spec(name) is not None)


def interfaces() -> tuple[Interface, ...]:
    """Return all addresses of those that are up, loopback first, then IPv4."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        _interface(name, entry.address, entry.netmask)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6) and name in up
    ]
    return tuple(sorted(found, key=lambda one: (not one.is_loopback, ":" in one.address, one.name)))


def _interface(name: str, address: str, netmask: str | None) -> Interface:
    plain, _, _ = address.partition("%")  # of a link-local address the scope
    if ":" in plain and netmask:
        netmask = str(int(ipaddress.IPv6Address(netmask)).bit_count())
    host = ipaddress.ip_interface(f"{plain}/{netmask}" if netmask else plain)
    return Interface(name, address, str(host.network), host.is_loopback)


def model(path: Path) -> Model:
    """Return what a model's folder says. Raises InvalidInputError if it isn't one."""
    config = path / "config.json"
    if not config.is_file():
        raise InvalidInputError("--model", f"no Hugging Face model (config.json and *.safetensors) in {path}")
    try:
        stated = json.loads(config.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInputError("--model", f"{config} is not a JSON object: {error}") from None
    stated = stated if isinstance(stated, dict) else {}
    facts, weights = read_facts(path, "--model"), weight_files(path, "--model")
    if not weights:
        families.check_random(config, "--model")
    kind = stated.get("dtype") or stated.get("torch_dtype")
    size = _BYTES_OF_DTYPE.get(str(kind), 2) if kind else 4
    positions = facts.positions if facts is not None else context_limit(stated)
    stored = sum(file.stat().st_size for file in weights) // size
    parameters = stored
    if facts is not None and (facts.quantized or not weights):
        parameters = sum(map(math.prod, facts.shapes.values()))
    return Model(
        path,
        parameters,
        positions if positions is not None and positions >= 2 else None,
        (path / "tokenizer.json").is_file(),
        facts,
        not weights,
        bool(stated.get("is_encoder_decoder")),
    )
