"""The text of a first run file and cluster file, from what was answered and what the machine and the model are like."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import tomli_w

from trainctl.protocol.config import addresses
from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.errors import installing
from trainctl.tui.setup.init_probe import Model, ThisMachine

STEPS, BATCH = 1000, 32
PRETRAIN_RATE, SFT_RATE, LORA_RATE = 3e-4, 2e-5, 2e-4
"""Learning rates to begin with: a small model from its start; all weights of a trained model; adapters, which take ten
times as much (Schulman and Thinking Machines Lab 2025)."""
SEQUENCE = 512
STATE_BYTES = 20
"""Of a parameter in training: weight, two moments and the accumulated gradient in float32, and the buffer summed."""
FROZEN_BYTES = 4
"""Of a frozen parameter in float32."""
_MICRO_BY_PARAMETERS = ((2e8, 8), (1e9, 4), (1e10, 2))
_RUN_HEAD = """\
# A run to start from. examples/run.toml in trainctl's sources has every setting, with its meaning and default.
# Try it with: trainctl check {file}, then trainctl run {file} --follow (an agent must run: trainctl-agent run).
# Several nodes share the batch by their speed, measured before step 1; [nodes.NAME] with share = N sets a node's part.
"""
_CLUSTER_HEAD = """\
# The nodes of the cluster. examples/cluster.toml in trainctl's sources has every setting.
# It is yours: trainctl never writes to it again. Nodes that `trainctl cluster add` adds go to cluster.d beside it.
"""


AdapterKind = Literal["full", "lora"]


class Answers(NamedTuple):
    """What a person or a script wants."""

    model: Path  # a folder, or the id of a model in the Hugging Face cache
    data: Path
    name: str
    address: str  # of this machine's agent
    steps: int = STEPS
    batch: int = BATCH  # samples per step
    kind: DataKind = "text"
    adapter: AdapterKind = "full"
    sequence_length: int = SEQUENCE

    @property
    def learning_rate(self) -> float:
        if self.adapter == "lora":
            return LORA_RATE
        return PRETRAIN_RATE if self.kind == "text" else SFT_RATE


def run_name(folder: Path) -> str:
    """A run's name after a folder: what a name can't have as dashes."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder.name.lower()).strip("-._")[:64] or "run"


def run_text(answers: Answers, model: Model, machine: ThisMachine, file: Path) -> str:
    """A run file that fits the model, data and address."""
    return _RUN_HEAD.format(file=file.name) + "\n" + tomli_w.dumps(run_tables(answers, model, machine))


def run_tables(answers: Answers, model: Model, machine: ThisMachine) -> dict[str, Any]:
    """The tables of `run_text`. Without a table of nodes all of the cluster take part; the one that names this node's
    interface is needed only off loopback."""
    interface = _interface_name(answers.address, machine)
    tables: dict[str, Any] = {
        "run": {"name": answers.name, "steps": answers.steps},
        "model": {"path": str(answers.model)},
        "data": {
            "path": str(answers.data), "kind": answers.kind, "tokenizer": "model" if model.has_tokenizer else "bytes",
            "sequence_length": min(answers.sequence_length, model.positions or answers.sequence_length),
        },
        "batch": {"global": answers.batch, "micro": min(micro(model.parameters), answers.batch)},
        "optimizer": {"learning_rate": answers.learning_rate, "warmup_steps": answers.steps // 20},
        "checkpoint": {"every_steps": max(1, answers.steps // 10)},
        "evaluate": {"every_steps": max(1, answers.steps // 20)},
    }  # fmt: skip
    tables |= {"adapter": {"kind": "lora"}} if answers.adapter == "lora" else {}
    return tables | ({"nodes": {machine.node: {"interface": interface}}} if interface else {})


def micro(parameters: int) -> int:
    """Samples per forward/backward to begin with; a rank that has not the memory halves it by itself."""
    return next((samples for most, samples in _MICRO_BY_PARAMETERS if parameters <= most), 1)


def cluster_text(tables: Mapping[str, Any]) -> str:
    """A cluster file of these tables."""
    return _CLUSTER_HEAD + "\n" + tomli_w.dumps(tables)


def cluster_tables(answers: Answers, machine: ThisMachine, key: str | None) -> dict[str, Any]:
    """This machine alone; off loopback with the network that it is in, as one over which gradients may travel."""
    entry = {"address": answers.address} | ({"key": key} if key else {})
    interface = machine.interface_of(addresses.split(answers.address).hostname or "")
    trusted = {} if interface is None or interface.is_loopback else {"trusted_networks": [interface.network]}
    return trusted | {"nodes": {machine.node: entry}}


def remarks(model: Model, machine: ThisMachine, adapter: AdapterKind = "full") -> list[str]:
    """What a person should know before the run is started, a line each."""
    found = []
    if not machine.backends:
        found.append(f"neither torch nor mlx is installed here; {installing('torch', 'mlx')}")
    need = model.parameters * (STATE_BYTES if adapter == "full" else FROZEN_BYTES)
    if need > machine.memory_bytes:
        found.append(
            f"about {model.parameters / 1e9:.3g} B parameters need {need / 1e9:,.0f} GB for training, without "
            f"activations; this machine has {machine.memory_bytes / 1e9:,.0f} GB"
        )
    return found


def _interface_name(address: str, machine: ThisMachine) -> str:
    found = machine.interface_of(addresses.split(address).hostname or "")
    return "" if found is None or found.is_loopback else found.name
