"""Cheap checks of a run file: of its objective, and of the files that it names, samples and rows by their first lines,
text by its size.

They need no tensor library, so the command line and the agent make them before a run directory exists.
"""

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from trainctl.protocol.config.objectives import OBJECTIVES, ObjectiveTable, caches_reference, objective_of, which_have
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import Collected, InvalidInputError

ROW_FIELDS = ("messages", "prompt", "completion", "text")
ROW_KINDS = '"text", "prompt" and "completion", or "messages"'
APART_FIELDS = ("prompt", "completion")
APART_KINDS = '"prompt" and "completion"'
PAIR_FIELDS = ("chosen", "rejected")
PAIR_KINDS = '"prompt", "chosen" and "rejected"'
_OF_PAIRS = " or ".join(f'"{name}"' for name, row in OBJECTIVES.items() if row.has_pairs)
PAIR_ALONE = f"has a chosen and a rejected answer, but no completion: train on pairs with objective.kind = {_OF_PAIRS}"
"""The problem with a row that `is_pair` where a row with one answer is needed."""
_SAMPLE_LINES = 8
_SAMPLE_BYTES = 16_777_216
"""Bytes of a line above which it and all that follows are left to the trainer to check."""


def check_json(path: Path, where: str) -> None:
    """Check whether a file holds one JSON object. Raises InvalidInputError, blaming `where` and naming the file."""
    try:
        json_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InvalidInputError(where, f"{path} is not a JSON object: {reason(error)}") from None


def check_samples(path: Path, where: str, *, grows: bool = False) -> None:
    """Check whether the first lines are JSON objects of equally many tokens and mask values. A last line without an end
    is left out of a file that `grows`. Raises InvalidInputError."""
    for place, line in _first_lines(path, where, grows=grows):
        _check_sample(line, place, where)


def check_rows(path: Path, where: str, *, grows: bool = False, pairs: bool = False, apart: bool = False) -> None:
    """Check whether the first lines of a JSON-lines file are rows of training data, or `pairs` of answers, or prompts
    `apart` from their completions; Parquet is left to the trainer. `grows` as for samples. Raises InvalidInputError."""
    if path.suffix.lower() == ".parquet":
        return
    fields, kinds = (APART_FIELDS, APART_KINDS) if apart else (PAIR_FIELDS, PAIR_KINDS)
    for place, line in _first_lines(path, where, grows=grows):
        try:
            row = json_object(line)
        except ValueError as error:
            raise InvalidInputError(where, f"{place}: not a JSON object: {reason(error)}") from None
        needs_all = pairs or apart
        if not needs_all and is_pair(row):
            raise InvalidInputError(where, f"{place}: {PAIR_ALONE}")
        there = [row.get(name) is not None for name in (fields if needs_all else ROW_FIELDS)]
        if not (all(there) if needs_all else any(there)):
            known = ", ".join(json.dumps(name) for name in list(row)[:8]) or "no field"
            raise InvalidInputError(where, f"{place}: needs {kinds if needs_all else ROW_KINDS}; it has {known}")


def is_pair(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a chosen and a rejected answer, and nothing that a row with one answer has."""
    return all(row.get(name) is not None for name in PAIR_FIELDS) and not any(
        row.get(name) is not None for name in ROW_FIELDS if name != "prompt"
    )


def check_bytes(files: Sequence[Path], sequence_length: int, where: str) -> None:
    """Check whether text files read as bytes, each followed by an end token, fill a block of `sequence_length` + 1
    tokens. Raises InvalidInputError."""
    tokens = sum(file.stat().st_size + 1 for file in files)
    if tokens <= sequence_length:
        want = sequence_length + 1
        raise InvalidInputError(
            where, f"the text has {tokens} tokens; one block needs {want} (data.sequence_length + 1)"
        )


def _first_lines(path: Path, where: str, *, grows: bool) -> Iterator[tuple[str, bytes]]:
    """Yield each of the first lines with its place, blank ones left out."""
    try:
        with path.open("rb") as file:
            for number in range(1, _SAMPLE_LINES + 1):
                line = file.readline(_SAMPLE_BYTES)
                if len(line) == _SAMPLE_BYTES or (grows and not line.endswith(b"\n")):
                    return
                if line.strip():
                    yield f"{path}: line {number}", line
    except OSError as error:
        raise InvalidInputError(where, f"{path} cannot be read: {reason(error)}") from None


def _check_sample(line: bytes, place: str, where: str) -> None:
    try:
        sample = json_object(line)
    except ValueError as error:
        raise InvalidInputError(where, f"{place}: not a JSON object: {reason(error)}") from None
    tokens, mask = sample.get("tokens"), sample.get("mask")
    if not isinstance(tokens, list) or not is_whole_numbers(tokens):
        raise InvalidInputError(where, f'{place}: "tokens" must be a list of whole numbers')
    if mask is None:
        return  # every token counts
    if not isinstance(mask, list):
        raise InvalidInputError(where, f'{place}: "mask" must be a list')
    if len(mask) != len(tokens):
        raise InvalidInputError(where, f"{place}: {len(tokens)} tokens but {len(mask)} mask values; give one per token")


def is_whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def json_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object in `raw`. Raises ValueError, also for one that is nested too deeply to be parsed."""
    try:
        found = json.loads(raw)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("its top level is not an object")  # noqa: TRY004  for the caller the file is wrong
    return found


def reason(error: OSError | ValueError) -> str:
    """Return what was wrong with a file, without its name."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, UnicodeDecodeError):
        return "not UTF-8 text"
    return str(error)


def check_cache_folder(folder: Path, where: str) -> None:
    """Check whether token caches can be written there, tried with a file that is removed at once; the last folder may
    be missing. Raises InvalidInputError."""
    above = folder if folder.exists() else folder.parent
    if not above.exists():
        raise InvalidInputError(where, f"no such folder: {above}; create it on that machine")
    if not above.is_dir():
        raise InvalidInputError(where, f"{above} is not a folder")
    if not os.access(above, os.W_OK | os.X_OK):
        raise InvalidInputError(where, f"no permission to write in {above}; change its owner or mode")
    try:
        tempfile.NamedTemporaryFile(prefix=".trainctl-", dir=above).close()
    except OSError:
        raise InvalidInputError(where, f"no file can be created in {above}; choose another folder") from None


def check(config: RunFile, where: str) -> None:
    """Raise InvalidInputError naming `where` and the field; with several, all of them."""
    objective, kind = config.objective, config.data.kind
    if kind == "text" and objective_of(objective, kind).needs_mask:
        problem = f'{objective.kind!r} needs data.kind = "rows" or "samples": text has no answers to learn'
        raise InvalidInputError(f"{where}: objective.kind", problem)
    wrong, row = Collected(), objective_of(objective, kind)
    for field in ObjectiveTable.__struct_fields__:
        if field not in ("kind", *row.settings) and getattr(objective, field) != getattr(ObjectiveTable(), field):
            problem = f"is a setting of objective.kind = {which_have(field)}; this run has {objective.kind!r}"
            with wrong.going_on():
                raise InvalidInputError(f"{where}: objective.{field}", problem)
    if row.has_pairs:
        with wrong.going_on():
            _check_preferences(config, where)
    if row.encodes_prompts:
        with wrong.going_on():
            _check_seq2seq(config, where)
    wrong.raise_any()


def _check_seq2seq(config: RunFile, where: str) -> None:
    wrong = Collected()
    for field, is_wrong, problem in (
        ("data.kind", config.data.kind != "rows", 'needs rows with a prompt and a completion: set "rows"'),
        ("data.tokenizer", config.data.tokenizer == "bytes", 'needs the tokenizer of its model: set "model"'),
        ("data.growing", config.data.growing, "needs whole files: set data.growing = false"),
        ("data.packing", config.data.packing != "none", 'does not support packing: set data.packing = "none"'),
        ("adapter.dropout", config.adapter.dropout > 0, "does not support adapter dropout: set adapter.dropout = 0"),
        ("model.base", config.model.base != "stored", 'does not support quantized bases: set model.base = "stored"'),
    ):
        with wrong.going_on():
            if is_wrong:
                raise InvalidInputError(f"{where}: {field}", f'"seq2seq" {problem}')
    wrong.raise_any()


def _check_preferences(config: RunFile, where: str) -> None:
    objective, wrong = config.objective, Collected()
    with wrong.going_on():
        _check_pairs(config, where)
    with wrong.going_on():
        if objective.reference == "adapter-off" and config.adapter.kind == "full":
            problem = '"adapter-off" needs adapters: set adapter.kind = "lora", or "cached" to train all weights'
            raise InvalidInputError(f"{where}: objective.reference", problem)
    with wrong.going_on():
        if caches_reference(objective, has_adapter=config.adapter.kind != "full") and config.model.init == "random":
            problem = '"dpo" needs a trained model as its reference: set "pretrained"'
            raise InvalidInputError(f"{where}: model.init", problem)
    with wrong.going_on():
        if objective.label_smoothing and objective.loss != "robust":
            problem = f'acts only on objective.loss = "robust"; this run has {objective.loss!r}'
            raise InvalidInputError(f"{where}: objective.label_smoothing", problem)
    wrong.raise_any()


def _check_pairs(config: RunFile, where: str) -> None:
    kind = f'"{config.objective.kind}"'
    if config.data.kind != "rows":
        problem = f'{kind} needs rows with a chosen and a rejected answer: set "rows"'
        raise InvalidInputError(f"{where}: data.kind", problem)
    if config.data.growing:
        raise InvalidInputError(f"{where}: data.growing", f"{kind} needs whole files: set data.growing = false")
    if config.data.packing != "none":
        problem = f'{kind} compares the two answers of a pair, which are not packed: set data.packing = "none"'
        raise InvalidInputError(f"{where}: data.packing", problem)
