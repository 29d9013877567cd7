"""`python -m tools.protocol_docs.docs [--check] [PATH]`: writes the tables of docs/protocol.md, the page for clients.

Types and limits come from the code at run time, the meaning of each field from the comment beside it in the source,
and that of a verb's argument from its declaration.
"""

import ast
import functools
import importlib
import inspect
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import inspect as shape

from tools.protocol_docs import examples, generated, meanings
from tools.protocol_docs.conversations import UNIONS, types_of
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.protocol.messages.verb_arguments import arguments_of
from trainctl.protocol.wire import codec

DEFAULT_PATH = Path("docs/protocol.md")
_MODULES = (
    "messages.base config.prompts calibration.profile messages.profiles messages.trainer messages.telemetry"
    " messages.events messages.requests messages.peers messages.kept messages.diagnosis"
    " messages.replies"
)
SOURCES = tuple(importlib.import_module(f"trainctl.protocol.{name}") for name in _MODULES.split())
"""Where messages and their parts are written, in the order of the page."""
CLIENT_TALKS = ("client to agent", "agent to client", "published by an agent")
"""The conversations that a client takes part in; the others are on the page of agents."""
Comments = dict[str, dict[str, str]]
"""Class -> field -> the comment beside it."""
CONSTANTS = {"None": "null", "True": "true", "False": "false"}
SHOWN = (
    ("client to agent", "snapshot-request"),
    ("client to agent", "command"),
    ("agent to client", "command-reply"),
    ("agent to client", "refusal"),
    ("published by an agent", "step-committed"),
    ("published by an agent", "heartbeat"),
)
"""The byte vectors on the page."""


def page() -> str:
    """Return the page for clients."""
    blocks = {"limits": _limits(), "metrics": _metrics(), "verbs": _verbs(), "bytes": shown_bytes(SHOWN)}
    return filled(DEFAULT_PATH, blocks | messages(CLIENT_TALKS, client_parts()))


def filled(path: Path, blocks: Mapping[str, str]) -> str:
    """Return a page with its tables and the protocol's version in its title."""
    title = rf"\1 {PROTOCOL_VERSION}"
    return re.sub(r"\A(# .*, version) \d+$", title, generated.filled(path, blocks), flags=re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return where links into a page can lead: its headings, as GitHub names them."""
    heads = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


def messages(talks: Iterable[str], parts: Iterable[type[msgspec.Struct]]) -> dict[str, str]:
    """Return the blocks `messages` and `parts`: a table for each message of some conversations, and for each part."""
    comments = field_comments(*SOURCES)
    return {
        "messages": "\n\n".join(_conversation(talk, comments) for talk in talks),
        "parts": "\n\n".join(_type(kind, comments) for kind in parts),
    }


# ---------------------------------------------------------------- what the source says


def field_comments(*modules: ModuleType) -> Comments:
    """Return the comments at the ends of the lines of each class's fields."""
    found: Comments = {}
    for module in modules:
        found |= _comments_of(inspect.getsource(module))
    return found


@functools.cache
def _comments_of(source: str) -> Comments:
    by_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.name: {
            field.target.id: " ".join(by_line[line] for line in _lines(field) if line in by_line)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef)
    }


def _lines(field: ast.AnnAssign) -> range:
    return range(field.lineno, (field.end_lineno or field.lineno) + 1)


def comment(kind: type, name: str, comments: Comments) -> str:
    """Return the comment beside a field, also one of a type above it, or the field's meaning."""
    said = (comments[base.__name__][name] for base in kind.__mro__ if name in comments.get(base.__name__, {}))
    return plain(next((text for text in said if text), "") or meanings.of(kind, name))


def purpose(kind: type) -> str:
    """Return a type's docstring on one line."""
    return plain(" ".join((vars(kind).get("__doc__") or "").split()))


def plain(text: str) -> str:
    """Return words of the source with its constants named as every language names them."""
    return re.sub(r"\b(None|True|False)\b", lambda found: CONSTANTS[found[0]], text)


def portable(pattern: str) -> str:
    """Return a pattern whose end is written as other languages do."""
    return pattern.replace(r"\Z", "$")


def client_parts() -> list[type[msgspec.Struct]]:
    """Return the parts of what clients send and receive."""
    _, named = msgspec.json.schema_components([UNIONS[talk] for talk in CLIENT_TALKS])
    return [kind for kind in part_types() if kind.__name__ in named]


def part_types() -> list[type[msgspec.Struct]]:
    """Return the structs inside messages, in the order of the source."""
    structs = [
        kind
        for module in SOURCES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    ]
    _, named = msgspec.json.schema_components([*UNIONS.values()])
    parts = [kind for kind in structs if not issubclass(kind, m.Message) and not kind.__subclasses__()]
    return [kind for kind in parts if kind.__name__ in named]


# ---------------------------------------------------------------- types in words


def words(kind: shape.Type) -> str:
    """Return a field's type as a person of any language reads it."""
    match kind:
        case shape.Metadata(type=within):
            return words(within)
        case shape.UnionType(types):
            return " or ".join(words(part) for part in sorted(types, key=lambda part: isinstance(part, shape.NoneType)))
        case shape.NoneType():
            return "null"
        case shape.BoolType():
            return "bool"
        case shape.IntType():
            return f"int{_bounds(kind)}"
        case shape.FloatType():
            return f"float{_bounds(kind)}"
        case shape.StrType():
            return f"string{_length(kind.min_length, kind.max_length)}{_pattern(kind.pattern)}"
        case shape.BytesType():
            return "bytes"
        case shape.LiteralType(values):
            return r" \| ".join(f'"{value}"' for value in sorted(map(str, values)))
        case shape.VarTupleType(item_type=item) | shape.ListType(item_type=item):
            return f"array{_length(None, kind.max_length)} of {words(item)}"
        case shape.TupleType(item_types=items):
            return f"[{', '.join(words(item) for item in items)}]"
        case shape.DictType(key_type=key, value_type=value):
            return f"map of {words(key)} to {words(value)}"
        case shape.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case shape.AnyType():
            return "any"
        case _:
            raise TypeError(f"no words for {kind}")


def _bounds(kind: shape.IntType | shape.FloatType) -> str:
    limits = ((">", kind.gt), ("≥", kind.ge), ("<", kind.lt), ("≤", kind.le))
    said = [
        f"{sign} {limit:g}" if isinstance(limit, float) else f"{sign} {limit}"
        for sign, limit in limits
        if limit is not None
    ]
    return f" {', '.join(said)}" if said else ""


def _length(low: int | None, high: int | None) -> str:
    if low is None and high is None:
        return ""
    return f" ({low or 0} to {high})" if high is not None else f" ({low} or more)"


def _pattern(pattern: str | None) -> str:
    return f" matching `{portable(pattern)}`" if pattern else ""


def _default(field: shape.Field) -> str:
    if field.required:
        return "required"
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    plain = msgspec.to_builtins(value)
    return f"`{msgspec.json.encode(plain).decode()}`" if not isinstance(value, msgspec.Struct) else "its defaults"


# ---------------------------------------------------------------- sections


def _conversation(talk: str, comments: Comments) -> str:
    kinds = types_of(talk)
    return f"### {talk[0].upper()}{talk[1:]}\n\n" + "\n\n".join(_type(kind, comments) for kind in kinds)


def _type(kind: type[msgspec.Struct], comments: Comments) -> str:
    info = shape.type_info(kind)
    assert isinstance(info, shape.StructType)
    tag = f"`{info.tag_field}` is `{info.tag}`. " if info.tag is not None else ""
    head = f"#### {kind.__name__}\n\n{tag}{purpose(kind)}".rstrip()
    order = "\n\nThis type is encoded as an array of its fields, in this order." if info.array_like else ""
    fields = [field for field in info.fields if field.encode_name != "v"]
    return f"{head}{order}\n\n{_fields(kind, fields, comments)}" if fields else f"{head}{order}"


def _fields(kind: type, fields: list[shape.Field], comments: Comments) -> str:
    rows = [
        f"| `{field.encode_name}` | {words(field.type)} | {_default(field)} | {_meaning(kind, field, comments)} |"
        for field in fields
    ]
    return "\n".join(["| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows])


def _meaning(kind: type, field: shape.Field, comments: Comments) -> str:
    return comment(kind, field.name, comments).replace("|", r"\|")


def _limits() -> str:
    control, bulk = codec.CONTROL_CAPS, codec.BULK_CAPS
    named = (
        ("string, bytes", "max_str_len"),
        ("binary, bytes", "max_bin_len"),
        ("array, items", "max_array_len"),
        ("map, entries", "max_map_len"),
        ("extension type, bytes", "max_ext_len"),
    )
    rows = [
        ("frame, bytes", codec.CONTROL_FRAME_BYTES, codec.FRAME_BYTES, codec.FRAME_BYTES),
        *((what, control[cap], control[cap], bulk[cap]) for what, cap in named),
        ("nesting, levels", codec.MAX_DEPTH, "", ""),
    ]
    lines = ["| " + " | ".join([what, *map(_number, values)]) + " |" for what, *values in rows]
    header = ["| limit | from a client | published | elsewhere |", "| --- | ---: | ---: | ---: |"]
    return "\n".join([*header, *lines])


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _metrics() -> str:
    rows = [
        f"| `{metric.name}` | {metric.unit or '—'} | {metric.scope} | {metric.help} |" for metric in m.METRICS.values()
    ]
    return "\n".join(["| metric | unit | scope | meaning |", "| --- | --- | --- | --- |", *rows])


def _verbs() -> str:
    rows = [
        f"| [`{verb.name}`](#{verb.name}) | {verb.scope} | {verb.affects} | {', '.join(sorted(verb.knobs)) or '—'} "
        f"| {f'`{verb.inverse}`' if verb.inverse else '—'} |"
        for verb in verbs.VERBS.values()
    ]
    scopes = [f"- **{scope}**: {what}." for scope, what in verbs.SCOPES.items()]
    table = ["| verb | scope | affects | changes | undone by |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n\n".join(["\n".join([*scopes, "", *table]), *map(_verb, verbs.VERBS.values())])


def _verb(verb: verbs.Verb) -> str:
    takes = " Requires a `node`." if verb.needs_node else " Accepts a `node`." if verb.takes_node else ""
    said = f"### {verb.name}\n\n{verb.summary[0].upper()}{verb.summary[1:]}.{takes} {purpose(verb.args)}".rstrip()
    info = shape.type_info(verb.args)
    assert isinstance(info, shape.StructType)
    rows = [
        f"| `{field.encode_name}` | {words(field.type)} | {about.unit or '—'} | {_default(field)} | {about.meaning} |"
        for field, about in zip(info.fields, arguments_of(verb), strict=True)
    ]
    table = ["| argument | type | unit | default | meaning |", "| --- | --- | --- | --- | --- |", *rows]
    return "\n\n".join([said, *(["\n".join(table)] if rows else [])])


def shown_bytes(vectors: Iterable[tuple[str, str]]) -> str:
    """Return some vectors, each as JSON and as the bytes of its frame."""
    parts = []
    for talk, name in vectors:
        vector = examples.vector(talk, name)
        text = msgspec.json.format(msgspec.json.encode(vector["message"]), indent=2).decode()
        frame = str(vector["frame"])
        lines = "\n".join(frame[start : start + 96] for start in range(0, len(frame), 96))
        parts.append(f"### `{name}`, {talk}\n\n```json\n{text}\n```\n\n```\n{lines}\n```")
    return "\n\n".join(parts)


def main() -> int:
    """Write or check it; the exit status."""
    return generated.main("tools.protocol_docs.docs", page, DEFAULT_PATH)


if __name__ == "__main__":
    sys.exit(main())
