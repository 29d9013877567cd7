"""Rows of training data from JSONL or Parquet: a text, a prompt with its completion, or a conversation.

A row has `text`, or `prompt` and `completion` (both text, or both lists of messages), or `messages`. A message has a
`role` and a `content`. Other fields are left alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config.input_checks import ROW_KINDS
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.common.errors import first_line

Message = dict[str, Any]
_BATCH_ROWS = 1024


class Text(NamedTuple):
    """Every token counts."""

    place: str  # FILE: line N
    text: str


class Completion(NamedTuple):
    """The completion's tokens count."""

    place: str
    prompt: str
    completion: str


class Conversation(NamedTuple):
    """The assistant's turns count, from `first` on."""

    place: str
    messages: list[Message]
    first: int = 0


Row = Text | Completion | Conversation


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file in its order. Raises InvalidInputError naming file, line and field."""
    for place, fields in _parquet(path) if path.suffix == ".parquet" else _json_lines(path):
        yield row_of(fields, place)


def row_of(fields: Any, place: str) -> Row:
    """One row. Raises InvalidInputError naming `place` and the field."""
    if not isinstance(fields, dict):
        raise InvalidInputError(place, "not a JSON object")
    if fields.get("messages") is not None:
        return _conversation(place, _messages(fields["messages"], place, "messages"), 0)
    if fields.get("prompt") is not None or fields.get("completion") is not None:
        return _prompted(fields.get("prompt"), fields.get("completion"), place)
    if isinstance(fields.get("text"), str):
        if not fields["text"]:
            raise InvalidInputError(f"{place}: text", "is empty")
        return Text(place, _checked(fields["text"], f"{place}: text"))
    known = ", ".join(json.dumps(name) for name in list(fields)[:8])
    raise InvalidInputError(place, f"needs {ROW_KINDS}; it has {known or 'no field'}")


def _prompted(prompt: Any, completion: Any, place: str) -> Row:
    for name, value in (("prompt", prompt), ("completion", completion)):
        if not isinstance(value, str | list):
            raise InvalidInputError(f"{place}: {name}", "must be text or a list of messages")
    if not completion:
        raise InvalidInputError(f"{place}: completion", "is empty, so the row has nothing to learn")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Completion(place, _checked(prompt, f"{place}: prompt"), _checked(completion, f"{place}: completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise InvalidInputError(place, "prompt and completion must both be text or both be lists of messages")
    before = _messages(prompt, place, "prompt")
    return _conversation(place, before + _messages(completion, place, "completion"), len(before))


def _conversation(place: str, messages: list[Message], first: int) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages[first:]):
        raise InvalidInputError(place, "no assistant turn, so the row has nothing to learn")
    return Conversation(place, messages, first)


def _messages(value: Any, place: str, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{place}: {field}", "must be a list of messages")
    for number, message in enumerate(value):
        where = f"{place}: {field}[{number}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidInputError(where, 'a message needs a "role"')
        if not isinstance(message.get("content"), str):
            raise InvalidInputError(where, 'a message needs a "content" of text')
        if message["role"] == "assistant" and not message["content"]:
            raise InvalidInputError(where, "the assistant's content is empty")
        _checked(message["content"], where)
    return value


def _checked(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(where, "contains half of a surrogate pair, which is not valid text") from None
    return text


def numbered_lines(path: Path) -> Iterator[tuple[str, bytes]]:
    """The lines of a file that aren't blank, each with its place."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}: line {number}", line


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for place, line in numbered_lines(path):
        try:
            yield place, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidInputError(place, f"not a JSON object: {first_line(error)}") from None


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InvalidInputError(str(path), f"Parquet needs pyarrow; {installing('parquet')}") from None
    number = 0
    try:
        file: Any = pyarrow.parquet.ParquetFile(path)
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for fields in batch.to_pylist():
                number += 1
                yield f"{path}: row {number}", fields
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInputError(str(path), f"not a readable Parquet file: {first_line(error)}") from None
