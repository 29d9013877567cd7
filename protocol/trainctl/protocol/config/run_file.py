"""The run file: one TOML document that describes a training run; read, checked, and seen from one node."""

import contextlib
import json
import math
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from trainctl.protocol.config import env_policy, families, input_checks, model_facts, quantization, validation_errors
from trainctl.protocol.config.alert_rules import check_thresholds
from trainctl.protocol.config.data_files import check_form, data_files, is_glob, lacks_files
from trainctl.protocol.config.objectives import objective_name, objective_of
from trainctl.protocol.config.policies import HELD_OUT_POLICIES, POLICIES, check_policies
from trainctl.protocol.config.run_tables import SUFFIXES, NodeTable, RunFile
from trainctl.protocol.config.validation_errors import NO_CHOICE, UNKNOWN_FIELD
from trainctl.protocol.errors import Collected, InvalidInputError

_GONE_POLICIES = ("clip-bound", "caches")
"""Policies of version 0.2.0, which kept the table of each in every run file."""
_NAMES_BEFORE: Final = {
    ("plateau", "min_rate"): "least_rate",
    ("spike", "min_back"): "least_back",
    ("spike", "max_times"): "most_times",
}
"""Settings of policies, with the name that version 0.2.0 has for each: files may still have it, and messages do."""
_EARLIER = "'s version of trainctl"
STANDARD_INPUT = "-"
"""As data.path: `trainctl run` copies its standard input into a growing file, and trains on that."""


def read(path: Path, overrides: dict[str, str] | None = None) -> RunFile:
    """The run file at `path`, its relative paths made absolute from its folder, `table.key` overrides laid over it.
    An override of `nodes` names all nodes that take part. Raises InvalidInputError naming the file and the field."""
    raw, named = validation_errors.read_toml(path, "run file"), (overrides or {}).get("nodes")
    for key, text in sorted((overrides or {}).items(), key=lambda pair: pair[0] != "nodes"):
        if named is not None and key.startswith("nodes.") and key.split(".")[1] not in raw["nodes"]:
            raise InvalidInputError("--set", f"{key} is of a node that nodes={named} leaves out: drop one, or name it")
        _override(raw, key, text)
    return parse(_absolute(raw, path.resolve().parent), str(path))


def parse(raw: dict[str, Any], where: str = "run file") -> RunFile:
    """Return the run file of parsed TOML. Raises InvalidInputError naming `where` and the field."""
    config = validation_errors.checked(_renamed(_without_gone(raw, where), where), RunFile, where)
    _check_sense(config, where)
    return config


def _without_gone(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the tables without the defaults of settings that only earlier versions have. Raises InvalidInputError for
    one that was chosen."""
    model, optimizer, policy = raw.get("model"), raw.get("optimizer"), raw.get("policy")
    if isinstance(policy, dict):
        raw = {**raw, "policy": {name: table for name, table in policy.items() if name not in _GONE_POLICIES}}
    if isinstance(model, dict) and model.get("dtype") == "bf16-sr":
        raise InvalidInputError(f"{where}: model.dtype", 'this version has no "bf16-sr": set "bfloat16"')
    if not isinstance(optimizer, dict) or "offload" not in optimizer:
        return raw
    if optimizer["offload"] is not False:
        raise InvalidInputError(f"{where}: optimizer.offload", 'is gone: leave it out, and set kind = "paged-adamw"')
    return {**raw, "optimizer": {key: value for key, value in optimizer.items() if key != "offload"}}


def _renamed(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the tables with today's names of settings. Raises InvalidInputError for one under both of its names."""
    policies = raw.get("policy")
    if not isinstance(policies, dict):
        return raw
    policies = dict(policies)
    for (policy, name), before in _NAMES_BEFORE.items():
        table = policies.get(policy)
        if not isinstance(table, dict) or before not in table:
            continue
        if name in table:
            raise InvalidInputError(f"{where}: policy.{policy}.{before}", f"is called {name} now: leave this one out")
        policies[policy] = {name if key == before else key: value for key, value in table.items()}
    return {**raw, "policy": policies}


def old_names(path: Path) -> tuple[str, ...]:
    """Return a hint for each setting that a valid run file has under an earlier name."""
    policies = validation_errors.read_toml(path, "run file").get("policy", {})
    return tuple(
        f"policy.{policy}.{before} is called {name} now; the old name will go"
        for (policy, name), before in _NAMES_BEFORE.items()
        if before in policies.get(policy, {})
    )


def to_dict(config: RunFile) -> dict[str, Any]:
    """Return a run file as TOML would hold it: no None."""

    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(item) for key, item in value.items() if item is not None}
        return value

    cleaned: dict[str, Any] = without_none(msgspec.to_builtins(config))
    if not config.run.steps:  # left out, for 0 is no number of steps
        del cleaned["run"]["steps"]
    return cleaned


def to_message(config: RunFile) -> dict[str, Any]:
    """Return a run file as an agent of any version reads it: without fields at their default, which an earlier version
    may lack, and with the names that settings have in 0.2.0. Within a protocol version no default changes, so that all
    agents of a run read the same."""
    message = _without_defaults(config)
    for (policy, name), before in _NAMES_BEFORE.items():
        table = message.get("policy", {}).get(policy, {})
        if name in table:
            table[before] = table.pop(name)
    return message


def _without_defaults(table: msgspec.Struct) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return _without_defaults(value) if isinstance(value, msgspec.Struct) else msgspec.to_builtins(value)

    fields = ((field, getattr(table, field.name)) for field in msgspec.structs.fields(table))
    return {field.encode_name: plain(value) for field, value in fields if value != _default(field)}


def _default(field: msgspec.structs.FieldInfo) -> Any:
    """NODEFAULT of a required field, which equals no value."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def with_remedy(problem: str, field: str, node: str) -> str:
    """Return what the agent of `node` has against a field of a run file that is valid here; for a field or a choice
    that it doesn't know, because its version is an earlier one, with what to do. A problem that has it already
    stays."""
    first, mark, count = problem.partition(" (and ")  # of several problems, the first is named
    value, lacks, choices = first.partition(NO_CHOICE)
    if _EARLIER in problem or not (lacks or first.startswith(UNKNOWN_FIELD)):
        return problem
    said = f"{node}{_EARLIER} has no {value}, only {choices}" if lacks else f"unknown to {node}{_EARLIER}"
    return f"{said}: upgrade {node}, or leave out {field.removeprefix('config: ')}{mark}{count}"


def on_node(config: RunFile, node: str) -> RunFile:
    """The run file as it is for one node: its own settings of the model and data in place of the common ones."""
    table = config.nodes.get(node)
    if table is None:
        return config
    model = msgspec.structs.replace(
        config.model,
        path=table.model_path or config.model.path,
        gradient_checkpointing=table.gradient_checkpointing or config.model.gradient_checkpointing,
        compile=table.compile or config.model.compile,
        attention=table.attention or config.model.attention,
    )
    data = msgspec.structs.replace(
        config.data,
        path=table.data_path or config.data.path,
        held_out_path=table.held_out_path or config.data.held_out_path,
    )
    return msgspec.structs.replace(config, model=model, data=data)


def on_this_machine(config: RunFile, node: str) -> RunFile:
    """The run file as it is for `node`, which is this machine: the id of a cached model is replaced by its folder."""
    config = on_node(config, node)
    model = msgspec.structs.replace(config.model, path=str(model_facts.model_folder(config.model.path)))
    return msgspec.structs.replace(config, model=model)


def held_out_data(config: RunFile) -> RunFile | None:
    """The run file with its held-out files as its only data; None if it has none."""
    if not config.data.held_out_path:
        return None
    data = msgspec.structs.replace(
        config.data, path=config.data.held_out_path, held_out=0.0, held_out_path="", packing="none", growing=False
    )
    return msgspec.structs.replace(config, data=data)


def cache_folder(config: RunFile, node: str, default: Path) -> Path:
    """The folder of a node's token caches."""
    own = config.nodes.get(node, NodeTable()).cache_path
    return default if own is None else Path(own)


def check_paths(config: RunFile, where: str = "run file", node: str = "") -> None:
    """Check whether model and data, as `node` has them, are there and can be what they should be, as far as that shows
    without loading them. Raises InvalidInputError naming the field and the path; with several, all of them."""
    own, here = config.nodes.get(node, NodeTable()), on_this_machine(config, node)
    model_field = f"nodes.{node}.model_path" if own.model_path is not None else "model.path"
    data_field = f"nodes.{node}.data_path" if own.data_path is not None else "data.path"
    wrong = Collected()
    with wrong.going_on(), _files_named(where):
        _check_model(here, f"{where}: {model_field}")
    with wrong.going_on(), _files_named(where):
        _check_data(here, f"{where}: {data_field}")
    if (held_out := held_out_data(here)) is not None:
        held_out_field = f"nodes.{node}.held_out_path" if own.held_out_path is not None else "data.held_out_path"
        with wrong.going_on(), _files_named(where):
            _check_data(held_out, f"{where}: {held_out_field}")
    with wrong.going_on():
        _check_objective(here, where)
    with wrong.going_on():
        _check_tokenizer(here, where)
    if own.cache_path is not None:
        with wrong.going_on():
            input_checks.check_cache_folder(Path(own.cache_path), f"{where}: nodes.{node}.cache_path")
    wrong.raise_any()


@contextlib.contextmanager
def _files_named(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidInputError(where, f"{error.filename}: {error.strerror}") from None


def end_mark(path: Path) -> Path:
    """The file beside a growing one that says that nothing more will be written to it."""
    return path.with_name(f"{path.name}.end")


def grows(config: RunFile) -> bool:
    """Return whether more may be written to the file of a run's data."""
    return config.data.growing and not end_mark(Path(config.data.path)).exists()


def needs_torch(config: RunFile) -> bool:
    """Return whether only torch has what a run asks for, so that it is what backend = "auto" means on every node."""
    return bool(_torch_only(config))


def _torch_only(config: RunFile) -> list[str]:
    """Return what is wrong with MLX ranks in a run, and what to do: one for each thing that MLX lacks."""
    found = []
    if objective_of(config.objective, config.data.kind).encodes_prompts:
        found.append('"seq2seq" needs torch, because mlx-lm has no encoder-decoder models: set "torch"')
    if config.model.base == "nf4":
        found.append('MLX has no "nf4": set model.base = "mlx-4bit" for all ranks, or train with torch')
    if config.optimizer.kind != "adamw":
        kind = config.optimizer.kind
        found.append(f'MLX has no {kind!r}: set optimizer.kind = "adamw" for all ranks, or train with torch')
    return found


def _check_tokenizer(config: RunFile, where: str) -> None:
    """Check whether the model has the tokenizer that the run file asks for, if the model is on this machine."""
    model = Path(config.model.path)
    tokenizer = model / "tokenizer.json"
    wanted = config.data.kind != "samples" and config.data.tokenizer == "model"
    if wanted and (model / "config.json").is_file() and not tokenizer.is_file():
        remedy = 'use "bytes" for a byte-level model'
        if objective_of(config.objective, config.data.kind).encodes_prompts:
            remedy = "save the model's tokenizer there with save_pretrained of transformers"
        raise InvalidInputError(f"{where}: data.tokenizer", f'"model" needs {tokenizer}; {remedy}')


def _check_objective(config: RunFile, where: str) -> None:
    name = objective_name(config.objective, config.data.kind)
    families.check_objective(Path(config.model.path), name, config.data.sequence_length, where)


def _check_model(config: RunFile, where: str) -> None:
    table, model = config.model, Path(config.model.path)
    model_facts.check_cached(table.path, where)
    if not model.exists():
        raise InvalidInputError(where, f"no such folder: {model}")
    if not (model / "config.json").is_file():
        raise InvalidInputError(where, f"no Hugging Face model (config.json and *.safetensors) in {model}")
    input_checks.check_json(model / "config.json", where)
    model_facts.check_no_code(json.loads((model / "config.json").read_bytes()), model, where)
    _check_quantization(config, model, where)
    if table.init == "random":
        families.check_random(model / "config.json", where)
        return
    if not model_facts.weight_files(model, where):
        wanted = f"{model_facts.SINGLE_FILE} or {model_facts.INDEX_FILE}"
        problem = f'{model} has a config.json but no weights ({wanted}); model.init = "random" needs none'
        raise InvalidInputError(where, problem)
    model_facts.stored_tensors(model, where)


def _check_quantization(config: RunFile, model: Path, where: str) -> None:
    stated = json.loads((model / "config.json").read_bytes())
    quantization.check_base(config.model.base, stated, model, where)
    if quantization.quantization_key(stated) is None:
        return
    if config.adapter.kind == "full":
        problem = f'{model} is quantized, and only whole weights can be trained: set adapter.kind = "lora"'
        raise InvalidInputError(where, problem)


def _check_data(config: RunFile, where: str) -> None:
    data = Path(config.data.path)
    if config.data.path == STANDARD_INPUT:
        problem = '"-" is standard input, which only trainctl run reads; to check a file: --set data.path=FILE'
        raise InvalidInputError(where, problem)
    several = "a folder" if data.is_dir() else "a glob" if is_glob(data) else ""
    if not several and not data.exists():
        raise InvalidInputError(where, f"no such file or folder: {data}")
    if several and config.data.kind == "samples":
        raise InvalidInputError(where, f"samples must be one JSON-lines file; {data} is {several}")
    if several and config.data.growing:
        raise InvalidInputError(where, f"a growing file must be one JSON-lines file; {data} is {several}")
    if config.data.kind == "text" and not data.is_dir() and data.suffix.lower() in SUFFIXES["rows"]:
        problem = f'{data} has rows or samples, not plain text: set data.kind = "rows" (or "samples")'
        raise InvalidInputError(where, problem)
    check_form(data, config.data.kind, where)
    files = data_files(data, config.data.kind)
    if not any(file.stat().st_size for file in files):
        if grows(config):
            return
        raise InvalidInputError(
            where, f"{data} {f'{lacks_files(data, config.data.kind)} with text' if several else 'is empty'}"
        )
    if config.data.kind == "samples":
        input_checks.check_samples(data, where, grows=grows(config))
    elif config.data.kind == "rows":
        for file in files:
            objective = objective_of(config.objective, config.data.kind)
            pairs, apart = objective.has_pairs, objective.encodes_prompts
            input_checks.check_rows(file, where, grows=grows(config), pairs=pairs, apart=apart)
    elif config.data.tokenizer == "bytes":
        input_checks.check_bytes(files, config.data.sequence_length, where)


def _check_sense(config: RunFile, where: str) -> None:
    """Check what no single field shows. Raises InvalidInputError with all of it."""
    wrong = Collected()
    with wrong.going_on():
        check_thresholds(config.alerts, where)
    with wrong.going_on():
        check_policies(config.policy, where)
    for check in (
        _check_lengths,
        _check_shares,
        input_checks.check,
        _check_init,
        _check_base,
        _check_backends,
        _check_held_out,
        _check_growing,
        _check_evaluations,
        _check_copies,
        _check_attention,
        _check_samples,
    ):
        with wrong.going_on():
            check(config, where)
    for name in config.nodes:
        with wrong.going_on():
            _check_node(config, name, where)
    wrong.raise_any()


COPY_COMMAND = "command"
"""The value of checkpoint.copy_to for the command that the node's own environment names."""
STORES = ("s3://", "gs://", "az://")
"""Schemes of the URLs of object stores in checkpoint.copy_to."""


def is_rsync_target(copy_to: str) -> bool:
    """Return whether a target is `HOST:FOLDER`, `USER@HOST:FOLDER` or `rsync://HOST/MODULE/FOLDER`."""
    is_url = "://" in copy_to and not copy_to.startswith("rsync://")
    return not copy_to.startswith("/") and ":" in copy_to and not is_url


def _check_copies(config: RunFile, where: str) -> None:
    to = config.checkpoint.copy_to
    is_known = to in ("", COPY_COMMAND) or to.startswith(("/", *STORES)) or is_rsync_target(to)
    if not is_known or to.lstrip("[").startswith("-") or re.search(r"@\[*-", to):  # ssh would take it for an option
        problem = f"{to!r} must be an absolute path, an rsync target such as backup@host:runs, a URL that begins with "
        problem += f'{", ".join(STORES)}, or "{COPY_COMMAND}"'
        raise InvalidInputError(f"{where}: checkpoint.copy_to", problem)


def _check_end(config: RunFile, where: str) -> None:
    run = config.run
    if not run.steps and not run.epochs:
        raise InvalidInputError(f"{where}: run.steps", "missing: give the number of steps, or run.epochs")
    if run.steps and run.epochs:
        raise InvalidInputError(f"{where}: run.epochs", "can't be combined with run.steps: remove one of them")
    if run.epochs and config.data.growing:
        raise InvalidInputError(f"{where}: run.epochs", "data that grow have no epochs: give run.steps")


def with_steps(config: RunFile, samples: int) -> RunFile:
    """Return the run file with the steps that its epochs of so many training samples need, in place of them."""
    if not config.run.epochs:
        return config
    steps = max(1, math.ceil(config.run.epochs * samples / config.batch.global_))
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=steps, epochs=0.0))


def _check_lengths(config: RunFile, where: str) -> None:
    optimizer, batch, wrong = config.optimizer, config.batch, Collected()
    with wrong.going_on():
        _check_end(config, where)
    with wrong.going_on():
        if config.run.steps and optimizer.warmup_steps >= config.run.steps:
            problem = f"{optimizer.warmup_steps} must be below run.steps = {config.run.steps}"
            raise InvalidInputError(f"{where}: optimizer.warmup_steps", problem)
    with wrong.going_on():
        if optimizer.warmup_steps and optimizer.warmup_ratio:
            problem = "can't be combined with optimizer.warmup_steps: remove one of them"
            raise InvalidInputError(f"{where}: optimizer.warmup_ratio", problem)
    with wrong.going_on():
        if config.data.kind == "text" and config.data.packing != "none":
            problem = 'packs rows and samples; text fills its blocks already: set data.packing = "none"'
            raise InvalidInputError(f"{where}: data.packing", problem)
    with wrong.going_on():
        if isinstance(batch.micro, int) and batch.micro > batch.global_:
            raise InvalidInputError(f"{where}: batch.micro", f"{batch.micro} is above batch.global = {batch.global_}")
    wrong.raise_any()


def _check_shares(config: RunFile, where: str) -> None:
    whole = config.batch.global_
    fixed = sum(node.share for node in config.nodes.values() if node.share is not None)
    if fixed > whole:
        raise InvalidInputError(f"{where}: nodes", f"shares sum to {fixed}, more than batch.global = {whole}")
    if config.nodes and all(node.share is not None for node in config.nodes.values()) and fixed != whole:
        raise InvalidInputError(f"{where}: nodes", f"shares sum to {fixed}, but batch.global = {whole}")


def _check_init(config: RunFile, where: str) -> None:
    if config.model.init == "random" and config.adapter.kind != "full":
        problem = 'adapters need a trained model: set adapter.kind = "full" or model.init = "pretrained"'
        raise InvalidInputError(f"{where}: model.init", problem)


def _check_base(config: RunFile, where: str) -> None:
    base = config.model.base
    modes = (config.model.compile, *(table.compile for table in config.nodes.values()))
    if base == "nf4" and any(mode not in (None, "off") for mode in modes):
        problem = "bitsandbytes' layers can't be compiled: set compile = \"off\", or a base in one of MLX's formats"
        raise InvalidInputError(f"{where}: model.compile", problem)
    nf4_only = {"double_quantization": config.model.double_quantization, "compute_dtype": config.model.compute_dtype}
    for field in [field for field, value in nf4_only.items() if value and base != "nf4"]:
        problem = f'acts only on model.base = "nf4"; this run has {base!r}'
        raise InvalidInputError(f"{where}: model.{field}", problem)
    if base == "stored":
        return
    if config.adapter.kind == "full":
        problem = f'{base!r} is for adapters, since packed weights can\'t be trained: set adapter.kind = "lora"'
        raise InvalidInputError(f"{where}: model.base", problem)


def _check_attention(config: RunFile, where: str) -> None:
    """Check whether "varlen" has packs, and settings that it can work with, in [model] and on each node."""
    wrong = Collected()
    for name, node in {"": NodeTable(), **config.nodes}.items():
        model, field = on_node(config, name).model, f"nodes.{name}" if node.attention else "model"
        for is_wrong, problem in (
            (config.data.packing == "none", 'is for packed samples: set data.packing = "best-fit"'),
            (model.dtype == "float32", 'computes in 16 bits: set model.dtype = "bfloat16"'),
            (model.compile != "off", 'can\'t be combined with compile: set compile = "off"'),
            (node.backend == "mlx", f"needs torch on an NVIDIA GPU, and {name} is on MLX: set another backend"),
        ):
            with wrong.going_on():
                if model.attention == "varlen" and is_wrong:
                    problem = f'"varlen" {problem}, or attention = "auto"'
                    raise InvalidInputError(f"{where}: {field}.attention", problem)
    wrong.raise_any()


def _check_backends(config: RunFile, where: str) -> None:
    wrong = Collected()
    for name in [name for name, node in config.nodes.items() if node.backend == "mlx"]:
        for problem in _torch_only(config):
            with wrong.going_on():
                raise InvalidInputError(f"{where}: nodes.{name}.backend", problem)
    wrong.raise_any()


def _check_samples(config: RunFile, where: str) -> None:
    """Raise InvalidInputError if no node that may answer can apply the model's generation_config.json."""
    node = config.samples.node
    backends = {config.nodes[node].backend} if node in config.nodes else {one.backend for one in config.nodes.values()}
    if config.samples.use_generation_config and backends == {"mlx"}:
        problem = "MLX doesn't apply generation_config.json: set it to false, or samples.node to a node with torch"
        raise InvalidInputError(f"{where}: samples.use_generation_config", problem)


def _check_held_out(config: RunFile, where: str) -> None:
    data = config.data
    if data.held_out_path and data.held_out:
        problem = "can't be combined with data.held_out: remove one of them"
        raise InvalidInputError(f"{where}: data.held_out_path", problem)
    for name, node in config.nodes.items():
        if node.held_out_path is not None and not data.held_out_path:
            problem = "needs data.held_out_path, the path for the other nodes"
            raise InvalidInputError(f"{where}: nodes.{name}.held_out_path", problem)


def _check_evaluations(config: RunFile, where: str) -> None:
    """Check whether the policies of the held-out loss have one."""
    modes = {name: config.policy.of(name).mode or POLICIES[name].default for name in HELD_OUT_POLICIES}
    for name in (name for name, mode in modes.items() if mode != "off"):
        if not config.evaluate.every_steps:
            problem = f"{modes[name]!r} needs evaluations: set evaluate.every_steps"
            raise InvalidInputError(f"{where}: policy.{name}.mode", problem)
        if not (config.data.held_out_fraction or config.data.held_out_path):
            problem = f"{modes[name]!r} needs held-out samples: set data.held_out or data.held_out_path"
            raise InvalidInputError(f"{where}: policy.{name}.mode", problem)


def _check_growing(config: RunFile, where: str) -> None:
    data, wrong = config.data, Collected()
    if not data.growing:
        return
    field = f"{where}: data.growing"
    with wrong.going_on():
        if data.kind == "text":
            problem = (
                'a growing file has a row or sample per line: set data.kind = "rows", with {"text": "..."} per line'
            )
            raise InvalidInputError(field, problem)
    with wrong.going_on():
        if data.packing != "none":
            raise InvalidInputError(field, 'can\'t be combined with packing: set data.packing = "none"')
    with wrong.going_on():
        if data.held_out:
            problem = "samples of a growing file can't be held out: set data.held_out = 0, or name data.held_out_path"
            raise InvalidInputError(field, problem)
    with wrong.going_on():
        if Path(data.path).suffix == ".parquet":
            raise InvalidInputError(field, f"a growing file must be one JSON-lines file; {data.path} is Parquet")
    wrong.raise_any()


def _check_node(config: RunFile, name: str, where: str) -> None:
    node, wrong = config.nodes[name], Collected()
    with wrong.going_on():
        env_policy.check(node.env, f"{where}: nodes.{name}.env")
    for key in ("model_path", "data_path", "held_out_path", "cache_path"):
        path = getattr(node, key)
        with wrong.going_on():
            if path is not None and not Path(path).is_absolute():
                problem = f"{path!r} must be an absolute path on that node"
                raise InvalidInputError(f"{where}: nodes.{name}.{key}", problem)
    with wrong.going_on():
        if node.share is not None and isinstance(node.micro, int) and node.micro > node.share:
            problem = f"{node.micro} is above the node's share of {node.share}"
            raise InvalidInputError(f"{where}: nodes.{name}.micro", problem)
    wrong.raise_any()


def _absolute(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A model's id stays as it is, for each node to find in its own cache, unless there is a folder of that name."""
    made = dict(raw)
    for table, key in (("model", "path"), ("data", "path"), ("data", "held_out_path")):
        value = made.get(table)
        if isinstance(value, dict) and isinstance(value.get(key), str) and value[key] not in ("", STANDARD_INPUT):
            path = folder / Path(value[key]).expanduser()
            if table == "data" or not model_facts.is_hub_id(value[key]) or path.exists() or _is_typo(path, value[key]):
                made[table] = {**value, key: str(path)}
    return made


def _is_typo(path: Path, text: str) -> bool:
    """Return whether a text in the form of an id is the path of a missing folder in one that is there."""
    return path.parent.is_dir() and model_facts.model_folder(text) == Path(text)


_ENDS = frozenset({"steps", "epochs"})
"""Settings of which one says when a run ends."""


def _only(tables: Any, names: list[str]) -> dict[str, Any]:
    """The tables of these nodes, which are all that take part; without shares if the file has other nodes."""
    tables = tables if isinstance(tables, dict) else {}
    kept = {name: tables.get(name, {}) for name in names}
    if kept.keys() == tables.keys():
        return kept
    return {
        name: {key: table[key] for key in table.keys() - {"share"}} if isinstance(table, dict) else table
        for name, table in kept.items()
    }


def _override(raw: dict[str, Any], key: str, text: str) -> None:
    if key == "nodes":
        raw["nodes"] = _only(raw.get("nodes", {}), [name.strip() for name in text.split(",")])
        return
    table, _, name = key.rpartition(".")
    if not table or not name:
        raise InvalidInputError("--set", f"{key!r} must have the form table.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    except RecursionError:
        raise InvalidInputError("--set", f"{key}: the value is nested too deeply") from None
    target = raw
    for part in table.split("."):
        target = target.setdefault(part, {})
        if not isinstance(target, dict):
            raise InvalidInputError("--set", f"{part!r} in {key!r} is a value, not a table")
    target[name] = value
    if table == "run" and name in _ENDS:  # in place of what the file gives
        for other in _ENDS - {name}:
            target.pop(other, None)
