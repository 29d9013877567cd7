"""The text of a first run file and cluster file, from what was answered and what the machine and the model are like."""

import contextlib
import math
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import tomli_w

from trainctl.protocol.batch.device_table import Preset
from trainctl.protocol.batch.memory_estimate import estimate_memory
from trainctl.protocol.batch.settings_rules import LEARNING_RATES
from trainctl.protocol.config import addresses, run_file
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.objectives import OBJECTIVES, ObjectiveName, sequences_of
from trainctl.protocol.config.run_tables import DataKind, NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.machine.facts import installed_version
from trainctl.tui.setup import installed
from trainctl.tui.setup.init_probe import Model, ThisMachine

AdapterKind = Literal["full", "lora", "rslora"]

CONTINUED_RATE = 1e-4
"""Learning rate for more text on a trained model, whose rate had come down at the end."""
T5_RATES: Final[tuple[float, float]] = (1e-4, 1e-3)
"""Learning rates for T5, which needs more than other models: of all weights, as transformers' page on T5 says, and of
adapters."""
T5_FAMILIES: Final = ("t5", "mt5", "umt5", "longt5")
SMALL_PARAMETERS, SMALL_FACTOR = 10**7, 10
"""A model of fewer parameters takes so many times the rate (Brown et al. 2020: the smaller, the higher)."""
ANSWER_EPOCHS: Final = 3
"""Passes over data of answers to begin with: they are learnt in a few. Text and pairs are rarely worth a second one."""
TIMED_PART = 0.7
"""Part of the time that a run may take, for steps: the rest is for its start, evaluations, answers and checkpoints, and
for other work on the machine."""
STEP_TOKENS = 16_384
"""The tokens of a step: steps of less are noisy, and of more rarely learn more in the time on a small machine."""
LEAST_SAMPLES = 4
"""The fewest samples of a step: fewer are one kind of sample."""
WARMUP_RATIO = 0.03
HELD_OUT_SAMPLES, MAX_HELD_OUT = 64, 0.1
"""Samples that are evaluated, in a tenth of a second each on a small machine, and the largest part of all."""
TIMES = 10
"""Evaluations and checkpoints in a run."""
MEMORY_PART = 0.6
"""The part of the device's memory that the estimate may take; other programs and the estimate's error need the rest."""
_RANKS = ((10**8, 8), (10**10, 16))
_MICROS = (64, 32, 16, 8, 4, 2)


def learning_rate(
    objective: ObjectiveName,
    adapter: AdapterKind,
    *,
    random: bool,
    family: str = "",
    parameters: int = SMALL_PARAMETERS,
) -> float:
    """Return AdamW's rate at its peak, for a model of a family (`model_type`) with so many parameters."""
    is_adapter = adapter != "full"
    if objective == "seq2seq" and family in T5_FAMILIES:
        return T5_RATES[is_adapter]
    rate = LEARNING_RATES[objective, is_adapter].first
    if OBJECTIVES[objective].has_pairs:
        return rate
    if objective == "pretrain" and not (is_adapter or random):
        rate = CONTINUED_RATE
    return round(rate * SMALL_FACTOR, 5) if parameters < SMALL_PARAMETERS else rate


def usual_epochs(objective: ObjectiveName) -> float:
    """Return the passes over the data to begin with."""
    spec = OBJECTIVES[objective]
    return ANSWER_EPOCHS if spec.needs_mask and not spec.has_pairs else 1


def adapter_rank(parameters: int) -> int:
    """Return the rank of adapters: 8, 16 from 100 M parameters, 32 from 10 B. Wider layers need more columns for the
    same part of their weights; more than that rarely helps."""
    return next((found for below, found in _RANKS if parameters < below), 32)


def adapter_alpha(kind: AdapterKind, rank_: int) -> float:
    """So that adapters are scaled by 2, whatever their rank: alpha / rank for LoRA, alpha / sqrt(rank) for rsLoRA."""
    return 2.0 * rank_ if kind == "lora" else round(2 * math.sqrt(rank_), 1)


def step_interval(steps: int) -> int:
    """Steps between two evaluations or checkpoints: a tenth of the run, but not every step."""
    return max(2, -(-steps // TIMES))


def held_out(samples: int) -> float:
    """Return the part of the samples to be kept for evaluation."""
    return float(f"{min(MAX_HELD_OUT, HELD_OUT_SAMPLES / samples):.2g}")


def global_batch(mean_tokens: float, samples: int | None) -> int:
    """Samples per step that have about STEP_TOKENS, a power of two; of few `samples` at most an eighth."""
    wanted = STEP_TOKENS / max(1.0, mean_tokens)
    if samples is not None:
        wanted = min(wanted, samples / 8)
    return max(LEAST_SAMPLES, 1 << math.floor(math.log2(max(1.0, wanted))))


def micro_batch(config: RunFile, facts: ModelFacts | None, backend: str, memory_bytes: int) -> int:
    """Return the most samples of full length per forward and backward pass whose estimate fits the memory, at least 1;
    at most STEP_TOKENS."""
    length, whole = config.data.sequence_length, config.batch.global_
    if facts is None:
        return 1
    for samples in _MICROS:
        if samples > whole or samples * length > STEP_TOKENS:
            continue
        node = NodeTable(micro=samples, micro_tokens=0, memory_limit_gb=memory_bytes / 1e9)
        found = estimate_memory(config, facts, node, "mlx" if backend == "mlx" else "torch", "run file")
        if found.total <= MEMORY_PART * memory_bytes:
            return samples
    return 1


STEPS = 1000
"""Steps of a run whose samples can't be counted here."""
ANSWER_TOKENS = 48
SEQUENCE = 512
STATE_BYTES = 20
"""The bytes of a parameter in training: weight, two moments and the accumulated gradient in float32, and the buffer
summed."""
FROZEN_BYTES = 4
"""The bytes of a frozen parameter in float32."""
_RUN_HEAD = """\
#:schema {schema}
# A run to start from. examples/run.toml in trainctl's sources has every setting, with its meaning and default.
# Try it with: trainctl check {file}, then trainctl run {file} --follow (an agent must run: trainctl-agent run).
# Several nodes share the batch by their speed, measured before step 1; [nodes.NAME] with share = N sets a node's part.
"""
_CLUSTER_HEAD = """\
#:schema {schema}
# The nodes of the cluster. examples/cluster.toml in trainctl's sources has every setting.
# It is yours: trainctl never writes to it again. Nodes that `trainctl cluster add` adds go to cluster.d beside it.
"""


@dataclass(frozen=True)
class Answers:
    """A first run as a person or a script wants it."""

    model: Path  # a folder, or the id of a model in the Hugging Face cache
    data: Path
    name: str
    address: str  # of this machine's agent
    steps: int | None = None  # None: epochs
    batch: int | None = None  # samples per step; None: by their tokens
    kind: DataKind = "text"
    adapter: AdapterKind = "full"
    objective: ObjectiveName = "pretrain"
    sequence_length: int = SEQUENCE
    mean_tokens: float | None = None  # of a sample; None: sequence_length
    samples: int | None = None  # of the data, if they were counted
    prompt: str = ""  # that the model answers during the run; empty: none
    held_out: Path | None = None  # data to evaluate with; None: a part of `data`


def run_name(folder: Path) -> str:
    """Return a run's name after a folder: what a name can't have as dashes."""
    return re.sub(r"[^a-z0-9._-]+", "-", folder.name.lower()).strip("-._")[:64] or "run"


def run_text(answers: Answers, model: Model, machine: ThisMachine, file: Path) -> str:
    """Return a run file that fits the model, data and address."""
    return (
        _RUN_HEAD.format(schema=installed.schema("run").as_uri(), file=file.name)
        + "\n"
        + tomli_w.dumps(run_tables(answers, model, machine))
    )


def run_tables(answers: Answers, model: Model, machine: ThisMachine) -> dict[str, Any]:
    """Return the tables of `run_text`. Without a table of nodes all of the cluster take part; the one that names this
    node's interface is needed only off loopback."""
    interface = _interface_name(answers.address, machine)
    preset = _preset(answers, model, machine)
    longest = (preset and preset.sequence_length) or answers.sequence_length
    length = min(answers.sequence_length, longest, model.positions or answers.sequence_length)
    mean = answers.mean_tokens or length * sequences_of(answers.objective)
    whole = answers.batch or (preset and preset.batch) or global_batch(mean, answers.samples)
    family = model.facts.family if model.facts is not None else ""
    rate = learning_rate(
        answers.objective, answers.adapter, random=model.is_random, family=family, parameters=model.parameters
    )
    epochs = usual_epochs(answers.objective)
    steps = answers.steps or (math.ceil(epochs * answers.samples / whole) if answers.samples else STEPS)
    every = step_interval(steps)
    if answers.held_out is not None:
        held: dict[str, Any] = {"held_out_path": str(answers.held_out)}
    else:
        held = {"held_out": held_out(answers.samples)} if answers.samples else {}
    tables: dict[str, Any] = {
        "run": {"name": answers.name} | ({"steps": answers.steps} if answers.steps else {"epochs": epochs}),
        "model": {"path": str(answers.model), "dtype": "auto"}
        | ({"base": preset.base} if preset is not None and preset.base != "stored" else {})
        | ({"init": "random"} if model.is_random else {}),
        "data": {
            "path": str(answers.data),
            "kind": answers.kind,
            "tokenizer": "model" if model.has_tokenizer else "bytes",
            "sequence_length": length,
        }
        | held,
        "batch": {"global": whole, "micro": 1},
        "optimizer": {"learning_rate": rate, "warmup_ratio": WARMUP_RATIO},
        "checkpoint": {"every_steps": every},
        "evaluate": {"every_steps": every, "at_start": True},
        "objective": {"kind": answers.objective},
    }
    if answers.prompt:
        samples = {"prompts": [answers.prompt], "every_steps": every, "at_start": True, "max_tokens": ANSWER_TOKENS}
        tables["samples"] = samples
    if answers.adapter != "full":
        rank = adapter_rank(model.parameters)
        alpha = adapter_alpha(answers.adapter, rank)
        tables["adapter"] = {"kind": answers.adapter, "rank": rank, "alpha": alpha}
    if preset is not None and preset.micro is not None:
        tables["batch"]["micro"] = min(preset.micro, whole)
    else:
        tables["batch"] |= _passes(tables, answers, model, machine)
    return tables | ({"nodes": {machine.node: {"interface": interface}}} if interface else {})


def _preset(answers: Answers, model: Model, machine: ThisMachine) -> Preset | None:
    """Return the preset of this machine's card, for adapters of a whole model; one with a 4-bit base where bitsandbytes
    is, and for a model that can have one."""
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
    fits = micro_batch(config, model.facts, backend, machine.device_bytes or machine.memory_bytes)
    longest = config.data.sequence_length * sequences_of(answers.objective)
    return {"micro": min(2 * fits, config.batch.global_), "micro_tokens": fits * longest}


def cluster_text(tables: Mapping[str, Any]) -> str:
    """Return a cluster file of these tables."""
    return _CLUSTER_HEAD.format(schema=installed.schema("cluster").as_uri()) + "\n" + tomli_w.dumps(tables)


def cluster_tables(answers: Answers, machine: ThisMachine, key: str | None) -> dict[str, Any]:
    """This machine alone; off loopback with the network that it is in, as one over which gradients may travel."""
    entry = {"address": answers.address} | ({"key": key} if key else {})
    interface = machine.interface_of(addresses.host(answers.address))
    of_interface = (
        []
        if interface is None or interface.is_loopback
        else [
            one.network
            for one in machine.interfaces
            if one.name == interface.name and not one.address.startswith("fe80:")
        ]
    )
    trusted = {"trusted_networks": [*dict.fromkeys(of_interface)]} if of_interface else {}
    return trusted | {"nodes": {machine.node: entry}}


def remarks(model: Model, machine: ThisMachine, adapter: AdapterKind = "full") -> list[str]:
    """Return what a person should know before the run is started, a line each."""
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
    """Raise InvalidInputError naming the first that exists."""
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
