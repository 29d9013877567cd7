"""Rows of training data from JSONL or Parquet: a text, a prompt with its completion, or a conversation.

A row has `text`, or `prompt` and `completion` (both text, or both lists of messages), or `messages`. A message has a
`role` and a `content`. Other fields are left alone.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config.input_checks import ROW_KINDS
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.chunks import Chunk, row_chunks

Message = dict[str, Any]


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
    for chunk in row_chunks(path):
        yield from rows_in(chunk)


def rows_in(chunk: Chunk) -> Iterator[Row]:
    """The rows of part of a file. Raises InvalidInputError naming file, line and field."""
    return (row_of(fields, place) for place, fields in objects_in(chunk))


def objects_in(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    """The values of part of a file, each with its place. Raises InvalidInputError naming file and line."""
    if isinstance(chunk.content, list):
        yield from ((place, fields_of(line, place)) for place, line in lines_in(chunk))
        return
    for number, fields in enumerate(chunk.content.to_pylist(), chunk.first):
        yield f"{chunk.source}: row {number}", fields


def fields_of(line: str | bytes, place: str) -> Any:
    """A line's JSON value. Raises InvalidInputError naming `place`."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(place, f"not a JSON object: {first_line(error)}") from None


def lines_in(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
    """The lines that aren't blank, each with its place."""
    for number, line in enumerate(chunk.content, chunk.first):
        if line.strip():
            yield f"{chunk.source}: line {number}", line


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


def prompt_of(fields: Any, place: str) -> str | list[Message]:
    """What a row has before an answer: its prompt, or its messages, which end with the user's. Raises InvalidInputError
    naming `place` and the field."""
    if not isinstance(fields, dict):
        raise InvalidInputError(place, "not a JSON object")
    if fields.get("messages") is not None:
        messages = _messages(fields["messages"], place, "messages")
        if messages[-1]["role"] == "assistant":
            raise InvalidInputError(f"{place}: messages", "must not end with an assistant turn: the model answers")
        return messages
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        return _messages(prompt, place, "prompt")
    if not isinstance(prompt, str) or not prompt:
        raise InvalidInputError(place, 'needs "prompt" (text or messages) or "messages"')
    return _checked(prompt, f"{place}: prompt")


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
