"""The text of a first run file and cluster file, from what was answered and what the machine and the model are like."""

import contextlib
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from trainctl.protocol.config import addresses, run_file
from trainctl.protocol.config.objectives import sequences_of
from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.config.usual_settings import Preset
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.machine.facts import installed_version
from trainctl.tui.setup import init_values as values
from trainctl.tui.setup.init_probe import Model, ThisMachine
from trainctl.tui.setup.init_values import AdapterKind, Objective

STEPS = 1000
"""Steps of a run whose samples can't be counted here."""
ANSWER_TOKENS = 48
SEQUENCE = 512
STATE_BYTES = 20
"""Of a parameter in training: weight, two moments and the accumulated gradient in float32, and the buffer summed."""
FROZEN_BYTES = 4
"""Of a frozen parameter in float32."""
_RUN_HEAD = """\
# A run to start from. examples/run.toml in trainctl's sources has every setting, with its meaning and default.
# Try it with: trainctl check {file}, then trainctl run {file} --follow (an agent must run: trainctl-agent run).
# Several nodes share the batch by their speed, measured before step 1; [nodes.NAME] with share = N sets a node's part.
"""
_CLUSTER_HEAD = """\
# The nodes of the cluster. examples/cluster.toml in trainctl's sources has every setting.
# It is yours: trainctl never writes to it again. Nodes that `trainctl cluster add` adds go to cluster.d beside it.
"""


class Answers(NamedTuple):
    """What a person or a script wants."""

    model: Path  # a folder, or the id of a model in the Hugging Face cache
    data: Path
    name: str
    address: str  # of this machine's agent
    steps: int | None = None  # None: epochs
    batch: int | None = None  # samples per step; None: by their tokens
    kind: DataKind = "text"
    adapter: AdapterKind = "full"
    objective: Objective = "pretrain"
    sequence_length: int = SEQUENCE
    mean_tokens: float | None = None  # of a sample; None: sequence_length
    samples: int | None = None  # of the data, if they were counted
    prompt: str = ""  # that the model answers during the run; empty: none
    held_out: Path | None = None  # data to evaluate with; None: a part of `data`


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
    preset = _preset(answers, model, machine)
    longest = (preset and preset.sequence_length) or answers.sequence_length
    length = min(answers.sequence_length, longest, model.positions or answers.sequence_length)
    mean = answers.mean_tokens or length * sequences_of(answers.objective)
    whole = answers.batch or (preset and preset.batch) or values.global_batch(mean, answers.samples)
    family = model.facts.family if model.facts is not None else ""
    rate = values.learning_rate(answers.objective, answers.adapter, random=model.is_random, family=family,
                                parameters=model.parameters)  # fmt: skip
    epochs = values.EPOCHS[answers.objective]
    steps = answers.steps or (math.ceil(epochs * answers.samples / whole) if answers.samples else STEPS)
    every = values.every(steps)
    if answers.held_out is not None:
        held_out: dict[str, Any] = {"held_out_path": str(answers.held_out)}
    else:
        held_out = {"held_out": values.held_out(answers.samples)} if answers.samples else {}
    tables: dict[str, Any] = {
        "run": {"name": answers.name} | ({"steps": answers.steps} if answers.steps else {"epochs": epochs}),
        "model": {"path": str(answers.model), "dtype": "auto"}
        | ({"base": preset.base} if preset is not None and preset.base != "stored" else {})
        | ({"init": "random"} if model.is_random else {}),
        "data": {
            "path": str(answers.data), "kind": answers.kind, "tokenizer": "model" if model.has_tokenizer else "bytes",
            "sequence_length": length,
        } | held_out,
        "batch": {"global": whole, "micro": 1},
        "optimizer": {"learning_rate": rate, "warmup_ratio": values.WARMUP_RATIO},
        "checkpoint": {"every_steps": every},
        "evaluate": {"every_steps": every, "at_start": True},
        "objective": {"kind": answers.objective},
    }  # fmt: skip
    if answers.prompt:
        samples = {"prompts": [answers.prompt], "every_steps": every, "at_start": True, "max_tokens": ANSWER_TOKENS}
        tables["samples"] = samples
    if answers.adapter != "full":
        rank = values.rank(model.parameters)
        alpha = values.alpha(answers.adapter, rank)
        tables["adapter"] = {"kind": answers.adapter, "rank": rank, "alpha": alpha}
    if preset is not None and preset.micro is not None:
        tables["batch"]["micro"] = min(preset.micro, whole)
    else:
        tables["batch"] |= _passes(tables, answers, model, machine)
    return tables | ({"nodes": {machine.node: {"interface": interface}}} if interface else {})


def _preset(answers: Answers, model: Model, machine: ThisMachine) -> Preset | None:
    """That of this machine's card, for adapters of a whole model; one with a 4-bit base where bitsandbytes is, and for
    a model that can have one."""
    preset = machine.preset
    if preset is None or answers.adapter == "full" or model.quantized_bytes:
        return None
    can_be_packed = not model.encodes_prompts and installed_version("bitsandbytes")
    return preset if preset.base == "stored" or can_be_packed else None


def _passes(tables: dict[str, Any], answers: Answers, model: Model, machine: ThisMachine) -> dict[str, Any]:
    """Return the samples per pass: of text as many as the first steps find fastest. Rows are shorter than the longest:
    twice as many as fit, limited by the tokens that fit the memory."""
    if answers.kind == "text":
        return {"micro": "auto"}
    config = run_file.parse(tables | {"model": tables["model"] | {"dtype": machine.dtype}})
    backend = "torch" if model.encodes_prompts else machine.backend
    fits = values.micro_batch(config, model.facts, backend, machine.device_bytes or machine.memory_bytes)
    longest = config.data.sequence_length * sequences_of(answers.objective)
    return {"micro": min(2 * fits, config.batch.global_), "micro_tokens": fits * longest}


def cluster_text(tables: Mapping[str, Any]) -> str:
    """A cluster file of these tables."""
    return _CLUSTER_HEAD + "\n" + tomli_w.dumps(tables)


def cluster_tables(answers: Answers, machine: ThisMachine, key: str | None) -> dict[str, Any]:
    """This machine alone; off loopback with the network that it is in, as one over which gradients may travel."""
    entry = {"address": answers.address} | ({"key": key} if key else {})
    interface = machine.interface_of(addresses.host(answers.address))
    of_interface = [] if interface is None or interface.is_loopback else [
        one.network for one in machine.interfaces if one.name == interface.name and not one.address.startswith("fe80:")
    ]  # fmt: skip
    trusted = {"trusted_networks": [*dict.fromkeys(of_interface)]} if of_interface else {}
    return trusted | {"nodes": {machine.node: entry}}


def remarks(model: Model, machine: ThisMachine, adapter: AdapterKind = "full") -> list[str]:
    """What a person should know before the run is started, a line each."""
    found = []
    if not machine.backends:
        found.append(f"neither torch nor mlx is installed here; {installing('torch', 'mlx')}")
    frozen = model.quantized_bytes or model.parameters * FROZEN_BYTES
    need = model.parameters * STATE_BYTES if adapter == "full" else frozen
    if need > machine.memory_bytes:
        found.append(
            f"about {model.parameters / 1e9:.3g} B parameters need {need / 1e9:,.0f} GB for training, without "
            f"activations; this machine has {machine.memory_bytes / 1e9:,.0f} GB"
        )
    return found


def _interface_name(address: str, machine: ThisMachine) -> str:
    found = machine.interface_of(addresses.host(address))
    return "" if found is None or found.is_loopback else found.name


def check_free(files: Sequence[Path]) -> None:
    """Raises InvalidInputError naming the first that exists."""
    for file in files:
        if file.exists() or file.is_symlink():
            raise InvalidInputError(str(file), "already exists and is never overwritten; give a different name")


@contextlib.contextmanager
def drafts(texts: dict[Path, str]) -> Iterator[dict[Path, Path]]:
    """Drafts beside the files, by file, for the caller to check; at a good end they get the files' names.

    Raises InvalidInputError naming a file that came to be there meanwhile or can't be written; none is left then.
    """
    check_free([*texts])
    made: dict[Path, Path] = {}
    try:
        for file, text in texts.items():
            made[file] = _draft(file, text)
        yield made
        _publish(made)
    finally:
        for draft in made.values():
            draft.unlink(missing_ok=True)


def _draft(file: Path, text: str) -> Path:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.stem}-{secrets.token_hex(4)}{file.suffix}")
        with draft.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise InvalidInputError(str(file), f"can't be written: {error.strerror}") from None
    return draft


def _publish(made: dict[Path, Path]) -> None:
    """A link never replaces a file, as a rename would."""
    linked: list[Path] = []
    try:
        for file, draft in made.items():
            file.hardlink_to(draft)
            linked.append(file)
    except OSError as error:
        for done in linked:
            done.unlink(missing_ok=True)
        raise InvalidInputError(str(file), f"can't be written: {error.strerror}") from None
