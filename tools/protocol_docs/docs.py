"""Write docs/protocol.md, the page for clients, and docs/protocol-agents.md, that of agents and trainers.

Types and limits come from the code at run time, the meaning of each field from the comment beside it in the source,
and that of a verb's argument from its declaration. A field with one meaning in several messages is explained once. The
page of agents has each message's purpose; the schema has its fields.
`python -m tools.pages` writes both pages.
"""

import ast
import functools
import importlib
import inspect
import io
import itertools
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import msgspec
from msgspec import inspect as shape

from tools.protocol_docs import examples, generated, meanings
from tools.protocol_docs.conversations import UNIONS, tag_of, types_of
from tools.protocol_docs.notation import enumerations, typed, words
from trainctl.protocol.config.objectives import HELD_OUT
from trainctl.protocol.messages import METRICS, Message, Metric, verbs
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.protocol.messages.events import EventData
from trainctl.protocol.messages.verb_arguments import arguments_of
from trainctl.protocol.wire import codec

CLIENTS, AGENTS = Path("docs/protocol.md"), Path("docs/protocol-agents.md")
_MODULES = (
    "messages.base config.run_tables calibration.profile messages.trainer messages.telemetry"
    " messages.events messages.requests messages.peers messages.kept messages.diagnosis"
    " messages.replies"
)
SOURCES = tuple(importlib.import_module(f"trainctl.protocol.{name}") for name in _MODULES.split())
"""Modules in which messages and their parts are written, in the order of the page."""
CLIENT_TALKS = ("client to agent", "agent to client", "published by an agent")
"""The conversations that a client takes part in; the others are on the page of agents."""
Comments = dict[str, dict[str, str]]
"""Class -> field -> the comment beside it."""
CONSTANTS = {"None": "null", "True": "true", "False": "false"}
SHOWN = {
    CLIENTS: (
        ("client to agent", "command"),
        ("agent to client", "command-reply"),
        ("published by an agent", "heartbeat"),
    ),
    AGENTS: (("agent to trainer", "step-plan"), ("trainer to agent", "formed")),
}
"""The byte vectors of each page."""
BETWEEN_AGENTS = (
    "LinkRequest",
    "LinkReply",
    "HostWork",
    "WorkHosted",
    "WorkFileRequest",
    "WorkFilePart",
    "SliceRequest",
    "SliceReply",
)
"""Requests and replies that agents send each other over the sockets of clients; the page of agents has them."""


@functools.cache
def page(path: Path) -> str:
    """Return one of the two pages."""
    text = generated.filled(path, _client_blocks() if path == CLIENTS else _agent_blocks())
    return re.sub(r"\A(# .*, version) \d+$", rf"\1 {PROTOCOL_VERSION}", text, flags=re.MULTILINE)


def _client_blocks() -> dict[str, str]:
    """Return the blocks of the clients' page, which explains every field of what clients send and receive."""
    comments = field_comments(*SOURCES)
    talks = {talk: [kind for kind in types_of(talk) if kind.__name__ not in BETWEEN_AGENTS] for talk in CLIENT_TALKS}
    kinds = [kind for group in talks.values() for kind in group]
    events = event_kinds()
    parts = [kind for kind in client_parts() if kind not in events]
    shared = _shared([*kinds, *parts], comments)
    return {
        "shared": _table("field", "meaning", rows=[(f"`{name}`", text) for name, text in sorted(shared.items())]),
        "messages": "\n\n".join(
            part
            for talk, group in talks.items()
            for part in (f"### {talk[0].upper()}{talk[1:]}", *(_type(kind, comments, shared) for kind in group))
        ),
        "parts": "\n\n".join(_type(kind, comments, shared) for kind in parts),
        "events": _events(events, comments),
        "enumerations": _enumerations([*kinds, *parts, *events]),
        "limits": _limits(),
        "metrics": _metrics(),
        "verbs": _verbs(),
        "bytes": _bytes(SHOWN[CLIENTS]),
    }


def _agent_blocks() -> dict[str, str]:
    """Return the blocks of the agents' page: each message with its purpose. The schema explains their fields."""
    talks: dict[str, list[type[Message]]] = {"agent to agent": []}
    for talk in UNIONS:
        for kind in types_of(talk):
            if kind.__name__ in BETWEEN_AGENTS:
                talks["agent to agent"].append(kind)
            elif talk not in CLIENT_TALKS:
                talks.setdefault(talk, []).append(kind)
    tables = (
        (
            f"### {talk[0].upper()}{talk[1:]}",
            _table(
                "type", "name", "meaning", rows=[(f"`{tag_of(kind)}`", kind.__name__, purpose(kind)) for kind in group]
            ),
        )
        for talk, group in talks.items()
    )
    return {"messages": "\n\n".join(part for table in tables for part in table), "bytes": _bytes(SHOWN[AGENTS])}


def anchors(text: str) -> set[str]:
    """Return where links into a page can lead: its headings, as GitHub names them."""
    heads = (line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", head).lower().replace(" ", "-") for head in heads}


# ---------------------------------------------------------------- what the source says


def field_comments(*modules: ModuleType) -> Comments:
    """Return the comments at the ends of the lines of each class's fields."""
    comments: Comments = {}
    for module in modules:
        comments |= _comments_of(inspect.getsource(module))
    return comments


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
    return re.sub(r"\b(None|True|False)\b", lambda constant: CONSTANTS[constant[0]], text)


@functools.cache
def client_parts() -> list[type[msgspec.Struct]]:
    """Return the parts of what clients send and receive."""
    _, named = msgspec.json.schema_components([UNIONS[talk] for talk in CLIENT_TALKS])
    return [kind for kind in part_types() if kind.__name__ in named]


@functools.cache
def part_types() -> list[type[msgspec.Struct]]:
    """Return the structs inside messages, in the order of the source."""
    structs = [
        kind
        for module in SOURCES
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__
    ]
    _, named = msgspec.json.schema_components([*UNIONS.values()])
    parts = [kind for kind in structs if not issubclass(kind, Message) and not kind.__subclasses__()]
    return [kind for kind in parts if kind.__name__ in named]


@functools.cache
def event_kinds() -> list[type[msgspec.Struct]]:
    """Return the kinds of event: what the data of one can be."""
    return [kind for kind in part_types() if issubclass(kind, EventData)]


# ---------------------------------------------------------------- sections


def _table(*head: str, rows: Iterable[Sequence[str]]) -> str:
    lines = ["|".join(cell.replace("|", r"\|") for cell in row) for row in rows]
    return "\n".join(f"|{line}|" for line in ("|".join(head), "|".join("---" for _ in head), *lines))


def _fields(kind: type) -> list[shape.Field]:
    """Return a type's fields without those that the page explains for all messages."""
    info = shape.type_info(kind)
    assert isinstance(info, shape.StructType)
    hidden = {"v", "boot", "seq"} if kind in types_of("published by an agent") else {"v", "rid"}
    return [field for field in info.fields if field.encode_name not in hidden]


def _label(field: shape.Field) -> str:
    """Return the name under which a field's meaning is shared: with `?` if it may be null."""
    nullable = isinstance(field.type, shape.UnionType) and field.type.includes_none
    return f"{field.encode_name}?" if nullable else field.encode_name


def _meaning(kind: type, field: shape.Field, comments: Comments) -> str:
    """Return a field's meaning without what the page says of all times and nulls."""
    return re.sub("(, in Unix seconds|; null: unknown)$", "", comment(kind, field.name, comments))


def _shared(kinds: Iterable[type[msgspec.Struct]], comments: Comments) -> dict[str, str]:
    """Return the meanings that a field has in two or more types, the most frequent one of each name."""
    counts = Counter((_label(field), _meaning(kind, field, comments)) for kind in kinds for field in _fields(kind))
    return {name: text for (name, text), count in reversed(counts.most_common()) if count > 1}


def _type(kind: type[msgspec.Struct], comments: Comments, shared: dict[str, str]) -> str:
    info = shape.type_info(kind)
    assert isinstance(info, shape.StructType)
    tag = f"`{info.tag}`: " if info.tag is not None else ""
    order = " Encoded as an array." if info.array_like else ""
    rows, also = [], []
    for field in _fields(kind):
        meaning = _meaning(kind, field, comments)
        if shared.get(_label(field)) == meaning and not info.array_like:
            also.append(f"`{field.encode_name}` {typed(field)}")
        else:
            rows.append((f"`{field.encode_name}`", typed(field), meaning))
    said = f"{tag}{purpose(kind)}{order}" + (f" Shared: {'; '.join(also)}." if also else "")
    parts = [f"#### {kind.__name__}", said, *([_table("field", "type", "meaning", rows=rows)] if rows else [])]
    return "\n\n".join(parts)


def _events(kinds: Iterable[type[msgspec.Struct]], comments: Comments) -> str:
    """Return the kinds of event in one table, each above its fields."""
    rows = []
    for kind in kinds:
        rows.append((f"`{kind.__struct_config__.tag}`", "", "", purpose(kind)))
        rows += [
            ("", f"`{field.encode_name}`", typed(field), _meaning(kind, field, comments)) for field in _fields(kind)
        ]
    return _table("kind", "field", "type", "meaning", rows=rows)


def _enumerations(kinds: Iterable[type[msgspec.Struct]]) -> str:
    """Return the named enumerations of some types and of the verbs' arguments."""
    arguments = [verb.args for verb in verbs.VERBS.values()]
    used = {
        word
        for kind in (*kinds, *arguments)
        for field in _fields(kind)
        for word in re.findall(r"\w+", words(field.type))
    }
    rows = sorted((name, ", ".join(sorted(values))) for values, name in enumerations().items() if name in used)
    return _table("name", "values", rows=rows)


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
        ("nesting, levels", codec.MAX_DEPTH, codec.MAX_DEPTH, codec.MAX_DEPTH),
    ]
    cells = [(what, *(f"{value:,}" for value in values)) for what, *values in rows]
    return _table("limit", "from a client", "published", "elsewhere", rows=cells)


def _metrics() -> str:
    """Return the table of metrics, one of an objective together with that of its held-out rows.

    Those of a step's phases are one row.
    """
    rows = []
    shown = [
        metric
        for metric in METRICS.values()
        if metric.name.removeprefix(HELD_OUT) not in METRICS.keys() - {metric.name}
    ]
    for (unit, scope, *_), group in itertools.groupby(shown, _likeness):
        metrics = list(group)
        names = [name for metric in metrics for name in (metric.name, f"{HELD_OUT}{metric.name}") if name in METRICS]
        columns = zip(*(metric.help.split() for metric in metrics), strict=True)
        said = (_either(tuple(dict.fromkeys(column))) for column in columns)
        rows.append((", ".join(f"`{name}`" for name in names), unit, scope, " ".join(said)))
    return _table("metric", "unit", "scope", "meaning", rows=rows)


def _likeness(metric: Metric) -> tuple[str, str, str]:
    """Return what the metrics of all phases have in common: all but the phase's name."""
    return metric.unit, metric.scope, metric.help.replace(metric.name.partition("_")[0], "")


def _either(words: tuple[str, ...]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _verbs() -> str:
    scopes = "\n".join(f"- **{scope}**: {what}." for scope, what in verbs.SCOPES.items())
    rows, arguments = [], []
    for verb in verbs.VERBS.values():
        node = "required" if verb.needs_node else "optional" if verb.takes_node else "no"
        said = f"{verb.summary}. {purpose(verb.args)}".removesuffix(" It has no arguments.").strip()
        knobs = ", ".join(sorted(verb.knobs))
        rows.append((f"`{verb.name}`", said, verb.scope, verb.affects, knobs, verb.inverse or "", node))
        info = shape.type_info(verb.args)
        assert isinstance(info, shape.StructType)
        arguments += [
            (f"`{verb.name}`", f"`{field.encode_name}`", typed(field), about.unit or "", about.meaning)
            for field, about in zip(info.fields, arguments_of(verb), strict=True)
        ]
    table = _table("verb", "what it does", "scope", "affects", "changes", "undone by", "`node`", rows=rows)
    return "\n\n".join([scopes, table, _table("verb", "argument", "type", "unit", "meaning", rows=arguments)])


def _bytes(vectors: Iterable[tuple[str, str]]) -> str:
    """Return some vectors, each as JSON and as the bytes of its frame."""
    parts = []
    for talk, name in vectors:
        vector = examples.vector(talk, name)
        text = msgspec.json.encode(vector["message"]).decode()
        frame = str(vector["frame"])
        lines = "\n".join(frame[start : start + 96] for start in range(0, len(frame), 96))
        parts.append(f"### `{name}`, {talk}\n\n```json\n{text}\n```\n\n```\n{lines}\n```")
    return "\n\n".join(parts)
