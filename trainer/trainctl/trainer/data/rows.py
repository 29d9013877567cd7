"""Rows of training data from JSONL or Parquet: a text, a prompt with its completion, or a conversation.

A row has `text`, or `prompt` and `completion` (both text, or both lists of messages), or `messages`. A message has a
`role` and a `content`, or calls tools; `weight` or `train` says whether an assistant's turn is learned. Rows of
messages may have `tools` and `chat_template_kwargs`. Other fields are left alone.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from trainctl.protocol.config.input_checks import PAIR_ALONE, ROW_KINDS, is_pair
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.chunks import Chunk

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
    tools: list[dict[str, Any]] | None = None  # that the model may call, as its chat template takes them
    template_settings: Mapping[str, Any] = MappingProxyType({})  # further variables of the chat template


Row = Text | Completion | Conversation


SETTINGS = ("weight", "train")
"""Fields of a message that say whether its turn is learned. The chat template doesn't see them."""
FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *SETTINGS})
"""Known fields of a message. Others go to the chat template as they are."""


class NoAnswerError(InvalidInputError):
    """A row of messages without a turn of the assistant that counts."""


def rows_in(chunk: Chunk) -> Iterator[Row]:
    """The rows of part of a file. Raises InvalidInputError naming file, line and field."""
    return (row_of(fields, place) for place, fields in objects_in(chunk))


def objects_in(chunk: Chunk) -> Iterator[tuple[str, Any]]:
    """The values of part of a file, each with its place. Raises InvalidInputError naming file and line."""
    if isinstance(chunk.content, list):
        yield from ((place, fields_of(line, place)) for place, line in lines_in(chunk))
        return
    for number, fields in enumerate(chunk.content.to_pylist(), chunk.first):
        yield f"{chunk.source}: row {number}", _without_nulls(fields)


def tool_names(row: Conversation) -> list[str]:
    """The names of a conversation's tools, and of those that its assistant calls."""
    calls = (call for message in row.messages for call in message.get("tool_calls") or ())
    named = (tool.get("function", tool) for tool in (*(row.tools or ()), *calls))
    return [one["name"] for one in named if isinstance(one, dict) and isinstance(one.get("name"), str)]


def _without_nulls(value: Any) -> Any:
    """Parquet gives each message and tool the fields of all others."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


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
    if is_pair(fields):
        raise InvalidInputError(place, PAIR_ALONE)
    if fields.get("messages") is not None:
        messages = _messages(fields["messages"], place, "messages")
        return _conversation(place, messages, 0, fields)
    if fields.get("prompt") is not None or fields.get("completion") is not None:
        return _prompted(fields, place)
    if isinstance(fields.get("text"), str):
        if not fields["text"]:
            raise InvalidInputError(f"{place}: text", "is empty")
        return Text(place, _checked(fields["text"], f"{place}: text"))
    known = ", ".join(json.dumps(name) for name in list(fields)[:8])
    raise InvalidInputError(place, f"needs {ROW_KINDS}; it has {known or 'no field'}")


def prompt_of(fields: Any, place: str) -> str | Conversation:
    """What a row has before an answer: its prompt, or its messages without a last turn of the assistant. Raises
    InvalidInputError naming `place` and the field."""
    if not isinstance(fields, dict):
        raise InvalidInputError(place, "not a JSON object")
    if fields.get("messages") is not None:
        messages = _messages(fields["messages"], place, "messages")
        if messages[-1]["role"] == "assistant":
            del messages[-1]
        if not messages:
            raise InvalidInputError(f"{place}: messages", "has only an answer; the model needs a prompt")
        return Conversation(place, messages, 0, _tools(fields, place), _template_settings(fields, place))
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        messages = _messages(prompt, place, "prompt")
        return Conversation(place, messages, 0, _tools(fields, place), _template_settings(fields, place))
    if not isinstance(prompt, str) or not prompt:
        raise InvalidInputError(place, 'needs "prompt" (text or messages) or "messages"')
    return _checked(prompt, f"{place}: prompt")


def _prompted(fields: dict[str, Any], place: str) -> Row:
    prompt, completion = fields.get("prompt"), fields.get("completion")
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
    whole = before + _messages(completion, place, "completion")
    return _conversation(place, whole, len(before), fields)


def _conversation(place: str, messages: list[Message], first: int, fields: dict[str, Any]) -> Conversation:
    turns = [message for message in messages[first:] if message["role"] == "assistant"]
    if not turns:
        raise NoAnswerError(place, "no assistant turn, so the row has nothing to learn")
    if not any(is_learned(turn) for turn in turns):
        raise NoAnswerError(place, "every assistant turn has weight 0, so the row has nothing to learn")
    return Conversation(place, messages, first, _tools(fields, place), _template_settings(fields, place))


def is_learned(message: Message) -> bool:
    """Return whether the tokens of an assistant's message count, as its `weight` and `train` say."""
    return all(message.get(name, 1) != 0 for name in SETTINGS)


def _template_settings(fields: dict[str, Any], place: str) -> dict[str, Any]:
    settings = fields.get("chat_template_kwargs") or {}
    if not isinstance(settings, dict):
        raise InvalidInputError(f"{place}: chat_template_kwargs", "must be a JSON object")
    return settings


def _tools(fields: dict[str, Any], place: str) -> list[dict[str, Any]] | None:
    value, where = fields.get("tools"), f"{place}: tools"
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(where, f"not a JSON list: {first_line(error)}") from None
    if not tools:
        return None
    if not _are_objects(tools):
        raise InvalidInputError(where, "must be a list of JSON objects, or that as text")
    _checked(json.dumps(tools, ensure_ascii=False), where)
    found: list[dict[str, Any]] = tools
    return found


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _messages(value: Any, place: str, field: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise InvalidInputError(f"{place}: {field}", "must be a list of messages")
    return [_message(message, f"{place}: {field}[{number}]") for number, message in enumerate(value)]


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise InvalidInputError(where, 'a message needs a "role"')
    message: Message = value
    for name in SETTINGS:
        if name in message and message[name] not in (0, 1):  # False and True equal them
            raise InvalidInputError(where, f'"{name}" is {json.dumps(message[name])[:40]}; it must be 0 or 1')
    if isinstance(message.get("content"), list):
        message = {**message, "content": "".join(_part(part, where) for part in message["content"])}
    if calls := message.get("tool_calls"):
        if not _are_objects(calls):
            raise InvalidInputError(where, '"tool_calls" must be a list of JSON objects')
        _checked(json.dumps(calls, ensure_ascii=False), where)
        if message["role"] == "assistant" and not message.get("content"):
            return message
    if not isinstance(message.get("content"), str):
        raise InvalidInputError(where, 'a message needs a "content" of text')
    if message["role"] == "assistant" and not message["content"]:
        raise InvalidInputError(where, "the assistant's content is empty")
    _checked(message["content"], where)
    return message


def _part(part: Any, where: str) -> str:
    """The text of a part of a message's content."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = json.dumps(part.get("type")) if isinstance(part, dict) else "unknown"
    raise InvalidInputError(where, f"the content has a part of type {kind}; parts must be text")


def _checked(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInputError(where, "contains half of a surrogate pair, which is not valid text") from None
    return text
