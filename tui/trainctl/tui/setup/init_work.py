"""The steps of `trainctl init`: ask for what isn't given, look at the machine, draft both files, check, keep them."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from trainctl.protocol.client import local_agents
from trainctl.protocol.config import addresses, run_file
from trainctl.protocol.config import cluster_file as cluster
from trainctl.protocol.config.data_files import is_glob, named_splits
from trainctl.protocol.config.model_facts import check_cached, is_hub_id, model_folder
from trainctl.protocol.config.objectives import OBJECTIVES, ObjectiveName, sample_unit, sequences_of
from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.errors import InvalidInputError, NotCachedError
from trainctl.protocol.files.durable_files import naming
from trainctl.protocol.security import keys
from trainctl.tui.commands import targets
from trainctl.tui.commands.checked_run_file import check_run_file
from trainctl.tui.setup import data_preview, init_files, init_probe
from trainctl.tui.setup.init_files import AdapterKind, Answers
from trainctl.tui.setup.init_probe import Model, ThisMachine

Ask = Callable[[str, str], str]
"""A question and the answer that Enter gives (empty: none) -> the answer."""
T = TypeVar("T")
PREFERENCES: tuple[ObjectiveName, ...] = tuple(name for name, spec in OBJECTIVES.items() if spec.has_pairs)
ADAPTERS: tuple[AdapterKind, ...] = ("full", "lora", "rslora")
DECODER_OBJECTIVES: tuple[ObjectiveName, ...] = tuple(n for n, spec in OBJECTIVES.items() if not spec.encodes_prompts)
MAX_TRIES = 3
"""Answers to a question until a wrong one ends the program."""
LENGTH_STEP = 64
"""Tokens to whose multiple a sequence length is rounded up."""
MOST_TOKENS = 32_768
"""Longest row that is measured where the model states no limit."""


@dataclass(frozen=True)
class InitOptions:
    """A first run as the options describe it. None was not said."""

    model: Path | None = None
    data: Path | None = None
    name: str | None = None
    steps: int | None = None
    minutes: float | None = None
    batch: int | None = None
    address: str | None = None
    adapter: AdapterKind | None = None
    objective: ObjectiveName | None = None


@dataclass(frozen=True)
class WrittenFiles:
    """The files that were written."""

    written: tuple[Path, ...]
    kept: Path | None  # the cluster file that was there already
    remarks: tuple[str, ...]


def write(given: InitOptions, file: Path, cluster_file: Path | None, ask: Ask | None) -> WrittenFiles:
    """Write both files, or only the run file where the default cluster file already exists, or isn't needed: programs
    find an agent on a Unix socket without one. Raises InvalidInputError, and then leaves no file."""
    target = cluster_file or cluster.default_path()
    kept = target if cluster_file is None and target.is_file() else None
    init_files.check_free([file] if kept else [file, target])
    machine = init_probe.machine()
    answers = answered(given, machine, ask, has_cluster=kept is not None)
    machine = replace(machine, node=machine.node_at(answers.address))
    model = init_probe.model(model_folder(str(answers.model)))
    if answers.kind == "rows" and machine.backends:
        answers = _measured(answers, model, machine)
    elif answers.kind == "text":
        answers = replace(answers, samples=init_probe.text_samples(answers.data, model, answers.sequence_length))
    answers = replace(answers, prompt=init_probe.prompt(answers.data, answers.kind))
    if answers.steps is None and not machine.backends:
        answers = replace(answers, steps=init_files.STEPS)
    remarks = []
    if given.minutes is not None:
        answers, estimate = _timed(answers, model, machine, given.minutes)
        remarks.append(estimate)
    texts = {file: init_files.run_text(answers, model, machine, file)}
    key = _own_key(answers.address)
    is_alone = addresses.socket_path(answers.address) is not None
    if kept is None and (cluster_file is not None or not is_alone):
        texts[target] = init_files.cluster_text(init_files.cluster_tables(answers, machine, key))
    with init_files.drafts(texts) as drafts:
        _check(drafts, file, kept or (target if target in drafts else None))
    remarks += init_files.remarks(model, machine, answers.adapter)
    if answers.held_out is not None:
        remarks.append(f"trains on {answers.data.name} and evaluates with {answers.held_out.name}")
    if key is None and not is_alone:
        remarks.append("an agent needs keys to listen on TCP: create them with trainctl keys new")
    if kept is not None:
        remarks.append(f"{kept} already exists and is kept")
    return WrittenFiles(tuple(texts), kept, tuple(remarks))


def _measured(answers: Answers, model: Model, machine: ThisMachine) -> Answers:
    """Return the answers with the data's 95th percentile, rounded up, as the length, and what else follows from their
    lengths. Raises InvalidInputError for data that can't be read."""
    with tempfile.TemporaryDirectory(prefix="trainctl-init-") as folder:
        draft = Path(folder) / "run.toml"
        with naming(draft):
            draft.write_text(init_files.run_text(answers, model, machine, draft), "utf-8")
        whole = {"data.overlong": "drop", "data.sequence_length": str(model.positions or MOST_TOKENS)}
        found = data_preview.read(draft, machine.node, 0, whole)
    length = -(-found.lengths["p95"] // LENGTH_STEP) * LENGTH_STEP
    mean = min(length * sequences_of(answers.objective), found.tokens / max(1, found.samples))
    return replace(answers, sequence_length=length, mean_tokens=mean, samples=found.samples)


def _timed(answers: Answers, model: Model, machine: ThisMachine, minutes: float) -> tuple[Answers, str]:
    """Return the answers with the steps that fit the minutes, by a few timed passes of the model, and the estimate.
    Raises InvalidInputError."""
    if not machine.backends:
        raise InvalidInputError("--minutes", "PyTorch or MLX must be here to time the model; give --steps")
    with tempfile.TemporaryDirectory(prefix="trainctl-init-") as folder:
        draft = Path(folder) / "run.toml"
        with naming(draft):
            draft.write_text(init_files.run_text(answers, model, machine, draft), "utf-8")
        config = run_file.read(draft)
        found = data_preview.measure_speed(draft, machine.node, {}, None, may_load=True)
    assert found.need is not None
    rate, batch = found.need.tokens_per_second, config.batch.global_
    mean = answers.mean_tokens or config.data.sequence_length * sequences_of(answers.objective)
    steps = max(2, int(init_files.TIMED_PART * 60 * minutes * rate / (batch * mean)))
    epochs = f", {steps * batch / answers.samples:.2g} epochs" if answers.samples else ""
    estimate = f"{steps:,} steps{epochs} take about {minutes:g} min: {found.need.detail} ran {rate:,.0f} tokens/s"
    return replace(answers, steps=steps), estimate


def _own_key(address: str) -> str | None:
    """This machine's agent's public key, if it has been made and is needed: not on a Unix socket."""
    folder = keys.KeyFolder()
    return folder.agent().public if folder.has("agent") and addresses.socket_path(address) is None else None


def answered(given: InitOptions, machine: ThisMachine, ask: Ask | None, *, has_cluster: bool) -> Answers:
    """Return what is given, what is asked for, and defaults for the rest. Raises InvalidInputError naming the
    option."""
    question = "Model: a Hugging Face folder, or an id such as Qwen/Qwen3-0.6B"
    model = _path(given.model, "--model", question, ask, _model)
    found = init_probe.model(model_folder(str(model)))  # before more is asked
    question = "Data: text (*.txt) or rows (*.jsonl, *.parquet), a file or a folder"
    data = _path(given.data, "--data", question, ask, _data)
    kind = init_probe.data_kind(data)
    splits = named_splits(data, kind)
    data = splits.get("train", data)
    has_pairs = kind == "rows" and init_probe.has_pairs(data)
    if found.encodes_prompts:
        _check_tokenizer(found)
        objective = _of_encoder(given.objective, "pairs" if has_pairs else kind)
    else:
        objective = _objective(given.objective, kind, has_pairs, ask)
    question = "Train all weights (full) or adapters (lora, rslora)"
    whole = found.is_random or (objective == "pretrain" and not found.quantized_bytes)
    usual = "full" if whole else "lora"
    adapter: AdapterKind = _asked(given.adapter, question, usual, ask, _choice("--adapter", ADAPTERS))
    name = _asked(given.name, "Run name", init_files.run_name(model), ask, str)
    steps = given.steps
    if steps is None and given.minutes is None:
        epochs = init_files.usual_epochs(objective)
        question = f"Steps, or auto for {epochs:g} {'epoch' if epochs == 1 else 'epochs'}"
        steps = _asked(None, question, "auto", ask, _auto_or_whole("--steps"))
    unit = sample_unit(objective).capitalize()
    question = f"{unit} per step across all nodes, or auto for about {init_files.STEP_TOKENS:,} tokens"
    batch = given.batch if given.batch is not None else _asked(None, question, "auto", ask, _auto_or_whole("--batch"))
    address, usual = given.address, local_agents.default_address()
    if len(machine.agents) == 1:
        usual = machine.agents[0].address
    if address is None and not has_cluster:
        address = _asked(None, _address_question(machine), usual, ask, lambda text: _checked_address(text, machine))
    address = _checked_address(address or usual, machine)
    held_out = splits.get("held-out")
    return Answers(model, data, name, address, steps, batch, kind, adapter, objective, held_out=held_out)


def _check_tokenizer(model: Model) -> None:
    if not model.has_tokenizer:
        problem = f"{model.path} has no tokenizer.json, which an encoder-decoder model needs: save its tokenizer there"
        raise InvalidInputError("--model", f"{problem} with save_pretrained of transformers")


def _of_encoder(given: ObjectiveName | None, data: str) -> ObjectiveName:
    """Return all that an encoder-decoder model can learn."""
    if data != "rows":
        problem = f"an encoder-decoder model needs rows of prompts and completions; the data is {data}"
        raise InvalidInputError("--data", problem)
    if given not in (None, "seq2seq"):
        raise InvalidInputError("--objective", f"an encoder-decoder model learns seq2seq, not {given}")
    return "seq2seq"


def _objective(given: ObjectiveName | None, kind: DataKind, has_pairs: bool, ask: Ask | None) -> ObjectiveName:
    """Asked only where the data have answers."""
    if given == "seq2seq":
        raise InvalidInputError("--objective", "seq2seq needs an encoder-decoder model, such as T5 or BART")
    if kind == "text":
        if given not in (None, "pretrain"):
            raise InvalidInputError("--objective", f"{given} needs rows with answers; the data is text")
        return "pretrain"
    if has_pairs:
        question = "Learn to prefer chosen answers, near a reference (dpo) or without one (orpo, simpo)"
        return _asked(given, question, "dpo", ask, _choice("--objective", PREFERENCES))
    question = "Learn the answers (sft) or every token (pretrain)"
    return _asked(given, question, "sft", ask, _choice("--objective", DECODER_OBJECTIVES))


def _model(path: Path) -> Path:
    """Return a folder, or the id of a model in the Hugging Face cache as it is. Raises NotCachedError if it isn't
    there."""
    if not path.exists() and is_hub_id(str(path)):
        check_cached(str(path), "--model")
        return path
    return _existing(path, "--model")


def _data(path: Path) -> Path:
    data = _existing(path, "--data")
    init_probe.data_kind(data)
    return data


def _path(given: Path | None, option: str, question: str, ask: Ask | None, check: Callable[[Path], Path]) -> Path:
    """Return a path that is given or asked for, once `check` accepts it."""
    if given is None and ask is None:
        raise InvalidInputError(option, "is required without a terminal to ask on")
    if given is not None:
        return check(given.expanduser())
    return _asked(None, question, "", ask, lambda text: check(Path(text).expanduser()))


def _existing(path: Path, option: str) -> Path:
    path = path.resolve() if ".." in path.parts else path.absolute()
    if not path.exists() and not is_glob(path):
        raise InvalidInputError(option, f"no such file or folder: {path}")
    return path


def _asked(given: T | None, question: str, default: str, ask: Ask | None, read: Callable[[str], T]) -> T:
    """Return what is given, or what `read` makes of the answer. After a wrong answer the question is asked again, below
    what was wrong."""
    if given is not None:
        return given
    if ask is None:
        return read(default)
    problem = ""
    for _ in range(MAX_TRIES - 1):
        try:
            return read(ask(problem + question, default))
        except NotCachedError:
            raise
        except InvalidInputError as error:
            problem = f"{error}\n"
    return read(ask(problem + question, default))


def _choice(option: str, choices: tuple[T, ...]) -> Callable[[str], T]:
    def read(text: str) -> T:
        if text not in choices:
            raise InvalidInputError(option, f"{text!r} is not one of {', '.join(map(str, choices))}")
        return next(choice for choice in choices if choice == text)

    return read


def _auto_or_whole(option: str) -> Callable[[str], int | None]:
    def read(text: str) -> int | None:
        if text == "auto":
            return None
        if not text.isdecimal() or not 1 <= int(text) <= 2**40:
            raise InvalidInputError(option, f"{text!r} is not a whole number of at least 1")
        return int(text)

    return read


def _address_question(machine: ThisMachine) -> str:
    there = ", ".join(f"{interface.address} ({interface.name})" for interface in machine.interfaces)
    return f"Address for this machine's agent, one of {there}"


def _checked_address(address: str, machine: ThisMachine) -> str:
    host = addresses.host(address)
    if not addresses.is_loopback(host) and machine.interface_of(host) is None:
        there = ", ".join(interface.address for interface in machine.interfaces)
        raise InvalidInputError("--address", f"{host} is not an address of this machine; its addresses are {there}")
    return address


def _check(drafts: dict[Path, Path], file: Path, cluster_file: Path | None) -> None:
    """Check the texts as `trainctl check` does, naming the files as they will be called."""
    found = targets.cluster_file(drafts.get(cluster_file, cluster_file)) if cluster_file is not None else None
    try:
        check_run_file(drafts[file], {}, local=True, cluster=found)
    except InvalidInputError as error:
        names: dict[str, Any] = {str(draft): str(target) for target, draft in drafts.items()}
        text = str(error)
        for draft, name in names.items():
            text = text.replace(draft, name)
        raise InvalidInputError(*text.split(": ", 1)) from None
