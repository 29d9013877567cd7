"""TOML files read and checked, with the validation errors of msgspec in the words of the person who typed the value."""

import difflib
import json
import re
import tomllib
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, Union, get_args, get_origin

import msgspec

from trainctl.protocol.errors import Collected, InvalidInputError

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "object": "a table",
    "array": "a list",
    "null": "nothing",
}
UNKNOWN_FIELD, NO_CHOICE = "unknown field", " is not one of "
REFUSED = "refused"
"""Key of a type's `msgspec.Meta.extra`: values that it doesn't have, each with the reason."""
NAMES_ELSEWHERE: Final = {
    "per_device_train_batch_size": "batch.micro",
    "micro_batch_size": "batch.micro",
    "train_batch_size": "batch.global",
    "batch_size": "batch.global",
    "global_batch_size": "batch.global",
    "gradient_accumulation_steps": "batch.global",
    "grad_accumulation_steps": "batch.global",
    "auto_find_batch_size": "batch.micro",
    "num_train_epochs": "run.epochs",
    "num_epochs": "run.epochs",
    "eval_strategy": "evaluate.every_steps",
    "evaluation_strategy": "evaluate.every_steps",
    "epochs": "run.epochs",
    "max_steps": "run.steps",
    "iters": "run.steps",
    "num_iterations": "run.steps",
    "learning_rate": "optimizer.learning_rate",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.schedule",
    "lr_scheduler": "optimizer.schedule",
    "lr_schedule": "optimizer.schedule",
    "warmup_ratio": "optimizer.warmup_ratio",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.epsilon",
    "max_grad_norm": "optimizer.clip_norm",
    "grad_clip": "optimizer.clip_norm",
    "optim": "optimizer.kind",
    "load_in_4bit": "model.base",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "torch_dtype": "model.dtype",
    "attn_implementation": "model.attention",
    "torch_compile": "model.compile",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "grad_checkpoint": "model.gradient_checkpointing",
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "tf32": "model.tf32",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "r": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "lora_target_modules": "adapter.targets",
    "use_rslora": "adapter.kind",
    "fine_tune_type": "adapter.kind",
    "num_layers": "adapter.layers",
    "lora_layers": "adapter.layers",
    "max_seq_length": "data.sequence_length",
    "max_length": "data.sequence_length",
    "sequence_len": "data.sequence_length",
    "block_size": "data.sequence_length",
    "cutoff_len": "data.sequence_length",
    "dataset": "data.path",
    "dataset_name": "data.path",
    "train_file": "data.path",
    "data_dir": "data.path",
    "dataloader_num_workers": "data.workers",
    "dataloader_prefetch_factor": "data.prefetch",
    "sample_packing": "data.packing",
    "val_set_size": "data.held_out",
    "test_size": "data.held_out",
    "eval_steps": "evaluate.every_steps",
    "steps_per_eval": "evaluate.every_steps",
    "save_steps": "checkpoint.every_steps",
    "save_every": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep_last",
    "resume_from_checkpoint": "trainctl run --resume RUN",
    "beta": "objective.beta",
    "label_smoothing": "objective.label_smoothing",
    "seed": "run.seed",
    "mask_prompt": "objective.kind",
    "scale": "adapter.alpha",
    "keys": "adapter.targets",
    "lora_parameters": "adapter.rank",
    "val_batches": "data.held_out",
    "adapter_path": "trainctl model export RUN --to mlx",
    "resume_adapter_file": "trainctl model export RUN --to fused",
    "run_name": "run.name",
    "output_dir": "trainctl model export RUN",
    "report_to": "trainctl mirror",
}
"""Settings as other trainers call them, with the name here of each; docs/from-other-trainers.md lists them."""
_PAGE: Final = "docs/from-other-trainers.md"
_BOUNDS = {">=": "of at least", "<=": "of at most", ">": "above", "<": "below"}


def split(text: str) -> tuple[str, str]:
    """The field's path (empty at the root) and the problem: "Expected `int` >= 1 - at `$.micro`" becomes
    ("micro", "must be a whole number of at least 1")."""
    problem, _, path = text.partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    missing = re.fullmatch(r"Object missing required field `(.+)`", problem)
    unknown = re.fullmatch(r"Object contains unknown field `(.+)`", problem)
    if missing:
        return f"{field}.{missing[1]}".lstrip("."), "is required but missing"
    if unknown:
        return f"{field}.{unknown[1]}".lstrip("."), UNKNOWN_FIELD
    return field, in_words(problem)


def found(value: Any, kind: Any, path: str = "", *, strict: bool = True) -> Iterator[tuple[str, str]]:
    """Everything that keeps plain values from being a `kind`, each as (field's path, problem): msgspec itself stops at
    the first, and calls the key of a table `[...]`. Without `strict`, texts are values too."""
    plain = _without_null(kind)
    if isinstance(value, dict) and isinstance(plain, type) and issubclass(plain, msgspec.Struct):
        yield from _in_struct(value, plain, path, strict=strict)
    elif isinstance(value, dict) and get_origin(plain) is dict:
        of_key, of_value = get_args(plain)
        for key, item in value.items():
            yield from _in_leaf(key, of_key, _under(path, key), strict=strict)
            yield from found(item, of_value, _under(path, key), strict=strict)
    else:
        yield from _in_leaf(value, kind, path, strict=strict)


def _in_struct(
    value: dict[str, Any], kind: type[msgspec.Struct], path: str, *, strict: bool
) -> Iterator[tuple[str, str]]:
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in value:
        if key not in fields and kind.__struct_config__.forbid_unknown_fields:
            named = getattr(kind, "keys_are_names", False)
            problem = f"{key!r}{NO_CHOICE}{', '.join(fields)}" if named else UNKNOWN_FIELD
            yield _under(path, key), problem + _meant(key, fields, elsewhere=getattr(kind, "is_of_run_file", False))
    for name, field in fields.items():
        if name in value:
            yield from found(value[name], field.type, _under(path, name), strict=strict)
        elif field.required:
            yield _under(path, name), "is required but missing"


def _meant(name: str, known: Iterable[str], *, elsewhere: bool) -> str:
    """Return what follows `unknown field`: the name that is meant, by another trainer's name for it or by its spelling;
    empty if none comes near. `elsewhere`: whether other trainers have such settings."""
    plain = name.lower().replace("-", "_")
    if elsewhere and (meant := NAMES_ELSEWHERE.get(plain)):
        return f"; other trainers' {plain} is {meant} here: see {_PAGE}"
    return did_you_mean(plain, known)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return what follows `unknown NAME`: the names that are spelled most like it; empty if none comes near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _in_leaf(value: Any, kind: Any, path: str, *, strict: bool) -> Iterator[tuple[str, str]]:
    try:
        msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        within, problem = split(str(error))
        yield _under(path, within), _of_choices(value, kind) or problem


def _of_choices(value: Any, kind: Any) -> str:
    """The problem with a value that isn't one of the type's few values or names; empty for other types."""
    plain = _without_null(kind)
    if isinstance(value, str) and (reason := _reasons(kind).get(value)):
        return f"{value!r} is not supported: {reason}"
    if choices := _choices(plain):
        return f"{value!r}{NO_CHOICE}{', '.join(map(str, choices))}"
    return _or_a_list(plain) if isinstance(value, str) else ""


def _choices(kind: Any) -> tuple[Any, ...]:
    """Return the choices of a type that is a few values alone."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else ()
    each = [_choices(part) for part in parts]
    return tuple(value for values in each for value in values) if all(each) else ()


def _reasons(kind: Any) -> dict[str, str]:
    """Values that people may expect but the type doesn't have, each with the reason from the type's metadata."""
    for part in (about for about in get_args(kind)[1:] if get_origin(kind) is Annotated):
        if isinstance(part, msgspec.Meta) and part.extra:
            return dict(part.extra.get(REFUSED, {}))
    return {}


def _or_a_list(kind: Any) -> str:
    """Return what a text must be where a field takes one of a few, or a list that its type names with an example."""
    if get_origin(kind) not in (Union, types.UnionType):
        return ""
    words = [word for part in get_args(kind) if get_origin(part) is Literal for word in get_args(part)]
    lists = [about for part in get_args(kind) if get_origin(part) is Annotated for about in get_args(part)[1:]]
    named = [about for about in lists if about.title and about.examples]
    if not words or len(named) != 1:
        return ""
    choices = " or ".join(map(json.dumps, words))
    return f"must be {choices} or a list of {named[0].title}, such as {json.dumps(named[0].examples[0])}"


def _under(path: str, field: str) -> str:
    return f"{path}{field}" if field.startswith("[") else f"{path}.{field}".strip(".")


def _without_null(kind: Any) -> Any:
    """The type behind what is said about it, and behind `| None`."""
    if get_origin(kind) is Annotated:
        return _without_null(get_args(kind)[0])
    if get_origin(kind) in (Union, types.UnionType):
        others = [one for one in get_args(kind) if one is not type(None)]
        return _without_null(others[0]) if len(others) == 1 else kind
    return kind


def in_words(problem: str) -> str:
    """One of msgspec's messages without its path, with types and bounds named as people name them."""
    if got := re.fullmatch(r"Expected `([a-z |]+)`(?:, got `.+`)?", problem):
        return f"must be {_type(got[1])}"
    if length := re.fullmatch(r"Expected `(str|array)` of length (>=|<=) (\d+)", problem):
        kind, of = ("text", "character") if length[1] == "str" else ("a list", "item")
        return f"must be {kind} {_BOUNDS[length[2]]} {length[3]} {of}{'s' if length[3] != '1' else ''}"
    if bound := re.fullmatch(r"Expected `([a-z]+)` (>=|<=|>|<) (\S+)", problem):
        return f"must be {_type(bound[1])} {_BOUNDS[bound[2]]} {bound[3].removesuffix('.0')}"
    if value := re.fullmatch(r"Invalid enum value (.+)", problem):
        return f"{value[1]} is not one of the allowed values"
    if pattern := re.fullmatch(r"Expected `str` matching regex (.+)", problem):
        return f"must match {pattern[1]}"
    return problem[0].lower() + problem[1:]


def _type(names: str) -> str:
    kinds = [_TYPES.get(name, name) for name in names.split(" | ") if name != "null"]
    return " or ".join(kinds)


T = TypeVar("T")


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file that is `what`, such as a run file. Raises InvalidInputError naming it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(str(path), f"no such {what}") from None
    except OSError as error:
        raise InvalidInputError(str(path), f"not a readable TOML file: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        other = "; trainctl init writes a run file" if path.suffix in (".yaml", ".yml", ".json") else ""
        raise InvalidInputError(str(path), f"not a readable TOML file: {error}{other}") from None
    except RecursionError:
        raise InvalidInputError(str(path), "not a readable TOML file: nested too deeply") from None


def checked(raw: dict[str, Any], kind: type[T], where: str) -> T:
    """The tables as a `kind`. Raises InvalidInputError naming `where` and the field; with several, all of them."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        wrong = Collected()
        for field, problem in [*found(raw, kind)] or [split(str(error))]:
            with wrong.going_on():
                raise InvalidInputError(f"{where}: {field}" if field else where, problem) from None
        wrong.raise_any()
        raise
