"""Rows of training data from JSONL or Parquet: texts, prompts with completions, conversations, and pairs of answers.

A row has `text`, or `prompt` and `completion` (both text, or both lists of messages), or `messages`. A message has a
`role` and a `content`, or calls tools; `weight` or `train` says whether an assistant's turn is learned. Rows of
messages may have `tools` and `chat_template_kwargs`.

A pair has `prompt`, `chosen` and `rejected`, all text or all lists of messages; or `chosen` and `rejected` alone, two
conversations whose first messages are the same and are the prompt. Other fields are left alone.

A file is read in chunks that are tokenized one by one: whole lines, or batches of Parquet rows.

`python -m trainctl.trainer.data.rows FILE [--prompts]` checks whether every row of a JSONL file can be used, as
training uses it or as a prompt. Exit status 0: it can; 2: one line on standard error names the first row that can't,
and why.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.protocol.config.input_checks import PAIR_ALONE, PAIR_KINDS, ROW_KINDS, is_pair
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.trainer.common.errors import first_line

MAX_LINE_BYTES = 1 << 26
LINES_BYTES = 1 << 19
"""Bytes of a chunk of lines. Larger ones take more memory."""
_PARQUET_ROWS = 256

Message = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """Part of a source."""

    source: Path
    content: Any  # bytes of text, a list of lines, or a pyarrow RecordBatch
    first: int  # its first line or row, from 1; of text its first byte, from 0
    size: int  # bytes of the source
    following: bytes = b""  # text: the start of the next part
    is_end: bool = True  # text: the file ends with it


@dataclass(frozen=True)
class Text:
    """Every token counts."""

    place: str  # FILE: line N
    text: str


@dataclass(frozen=True)
class Completion:
    """The completion's tokens count."""

    place: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Conversation:
    """The assistant's turns count, from `first` on."""

    place: str
    messages: list[Message]
    first: int = 0
    tools: list[dict[str, Any]] | None = None  # that the model may call, as its chat template takes them
    template_settings: Mapping[str, Any] = field(default_factory=dict)  # further variables of the chat template


Row = Text | Completion | Conversation
SETTINGS = ("weight", "train")
"""Fields of a message that say whether its turn is learned. The chat template doesn't see them."""
FIELDS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *SETTINGS})
"""Known fields of a message. Others go to the chat template as they are."""


class NoAnswerError(InvalidInputError):
    """A row of messages without a turn of the assistant that counts."""


def row_chunks(path: Path, *, grows: bool = False) -> Iterator[Chunk]:
    """Yield the rows of a JSON-lines or Parquet file; if it `grows`, without a last line that has no end. Raises
    InvalidInputError for one that isn't Parquet, and for a line that is longer than any row."""
    return _parquet_chunks(path) if path.suffix.lower() == ".parquet" else _line_chunks(path, grows=grows)


def _line_chunks(path: Path, *, grows: bool) -> Iterator[Chunk]:
    first, lines, size = 1, list[bytes](), 0
    with path.open("rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                limit = f"longer than {MAX_LINE_BYTES // 2**20} MB, the most for one row"
                problem = f"{limit}; one JSON object a line is read"
                raise InvalidInputError(f"{path}: line {first + len(lines)}", problem)
            if grows and not line.endswith(b"\n"):
                break
            lines.append(line)
            size += len(line)
            if size >= LINES_BYTES:
                yield Chunk(path, lines, first, size)
                first, lines, size = first + len(lines), [], 0
    if lines:
        yield Chunk(path, lines, first, size)


def _parquet_chunks(path: Path) -> Iterator[Chunk]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise InvalidInputError(str(path), f"Parquet needs pyarrow; {installing('parquet')}") from None
    first = 1
    try:
        file: Any = pyarrow.parquet.ParquetFile(path)
        row_bytes = path.stat().st_size / max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
            yield Chunk(path, batch, first, int(row_bytes * batch.num_rows))
            first += batch.num_rows
    except (OSError, pyarrow.ArrowException) as error:
        raise InvalidInputError(str(path), f"not a readable Parquet file: {first_line(error)}") from None


def rows_in(chunk: Chunk, *, are_pairs: bool = False) -> Iterator[Row]:
    """Yield the rows of part of a file; of pairs the chosen and the rejected half of each, as prompt and completion.
    Raises InvalidInputError naming file, line and field."""
    for place, fields in objects_in(chunk):
        yield from pair_of(fields, place) if are_pairs else (row_of(fields, place),)


def objects_in(chunk: Chunk) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of part of a file, each with its place. Raises InvalidInputError naming file and line."""
    if isinstance(chunk.content, list):
        return ((place, fields_of(line, place)) for place, line in lines_in(chunk))
    rows = enumerate(chunk.content.to_pylist(), chunk.first)
    return ((f"{chunk.source}: row {number}", _without_nulls(fields)) for number, fields in rows)


def tool_names(row: Conversation) -> list[str]:
    """Return the names of a conversation's tools, and of those that its assistant calls."""
    calls = (call for message in row.messages for call in message.get("tool_calls") or ())
    named = (tool.get("function", tool) for tool in (*(row.tools or ()), *calls))
    return [use["name"] for use in named if isinstance(use, dict) and isinstance(use.get("name"), str)]


def _without_nulls(value: Any) -> Any:
    """Leave out the fields that Parquet gives each message and tool because others have them."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def fields_of(line: str | bytes, place: str) -> dict[str, Any]:
    """Return a line's JSON object. Raises InvalidInputError naming `place`."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(place, f"not a JSON object: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise InvalidInputError(place, "not a JSON object")
    return value


def lines_in(chunk: Chunk) -> Iterator[tuple[str, bytes]]:
    """Yield the lines that aren't blank, each with its place."""
    for number, line in enumerate(chunk.content, chunk.first):
        if line.strip():
            yield f"{chunk.source}: line {number}", line


def row_of(fields: dict[str, Any], place: str) -> Row:
    """Return one row. Raises InvalidInputError naming `place` and the field."""
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
    names = ", ".join(json.dumps(name) for name in list(fields)[:8])
    raise InvalidInputError(place, f"needs {ROW_KINDS}; it has {names or 'no field'}")


def prompt_of(fields: dict[str, Any], place: str) -> str | Conversation:
    """Return the part of a row before an answer: its prompt, or its messages without a last turn of the assistant.
    Raises InvalidInputError naming `place` and the field."""
    prompt = fields.get("prompt")
    if fields.get("messages") is not None:
        messages = _messages(fields["messages"], place, "messages")
        if messages[-1]["role"] == "assistant":
            del messages[-1]
        if not messages:
            raise InvalidInputError(f"{place}: messages", "has only an answer; the model needs a prompt")
    elif isinstance(prompt, list):
        messages = _messages(prompt, place, "prompt")
    elif isinstance(prompt, str) and prompt:
        return _checked(prompt, f"{place}: prompt")
    else:
        raise InvalidInputError(place, 'needs "prompt" (text or messages) or "messages"')
    return Conversation(place, messages, 0, _tools(fields, place), _template_settings(fields, place))


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
    objects: list[dict[str, Any]] = tools
    return objects


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


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
    """Return the text of a part of a message's content."""
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


HALVES = ("chosen", "rejected")


def common_length(left: Sequence[object], right: Sequence[object]) -> int:
    """Return how many items two sequences have in common from their start."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (mine, theirs) in pairs if mine != theirs), min(len(left), len(right)))


def pair_of(fields: dict[str, Any], place: str) -> tuple[Row, Row]:
    """Return the chosen and the rejected half of one row. Raises InvalidInputError naming `place` and the field."""
    if any(fields.get(half) is None for half in HALVES):
        raise InvalidInputError(place, f"needs {PAIR_KINDS}")
    if fields["chosen"] == fields["rejected"]:
        raise InvalidInputError(place, "chosen and rejected are equal, so the pair has no preference to learn")
    prompt, answers = fields.get("prompt"), [fields[half] for half in HALVES]
    if prompt is None:
        if not all(isinstance(answer, list) for answer in answers):
            raise InvalidInputError(f"{place}: prompt", "is missing: only lists of messages may begin with the prompt")
        same = common_length(*answers)
        if not same:
            raise InvalidInputError(place, "chosen and rejected have no first message in common, so there is no prompt")
        prompt, answers = answers[0][:same], [answer[same:] for answer in answers]
    whole = {name: value for name, value in fields.items() if name not in (*HALVES, "messages")} | {"prompt": prompt}
    rows = []
    for half, answer in zip(HALVES, answers, strict=True):
        if not answer:
            raise InvalidInputError(f"{place}: {half}", "is empty, so the pair has nothing to compare")
        try:
            rows.append(row_of({**whole, "completion": answer}, place))
        except InvalidInputError as error:
            where = error.where.replace(": completion", f": {half}")
            raise InvalidInputError(where, error.problem.replace("completion", half)) from None
    return rows[0], rows[1]


def main() -> int:
    """Check a file; return the exit status."""
    use = prompt_of if "--prompts" in sys.argv[2:] else row_of
    try:
        for chunk in row_chunks(Path(sys.argv[1])):
            for place, line in lines_in(chunk):
                use(fields_of(line, place), place)
    except NoAnswerError as error:
        print(f"{error.where}: no assistant turn to score; use --answers", file=sys.stderr)
        return error.exit_code
    except InvalidInputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
