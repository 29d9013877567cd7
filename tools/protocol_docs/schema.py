"""docs/protocol.schema.json, made from the message types by `python -m tools.pages`.

One JSON Schema (draft 2020-12) of every message: the root takes any, `$defs` has one entry a conversation and one a
type. What each field means, and its unit, is the comment beside it in the source, as in docs/protocol.md; a verb's
arguments have theirs from its declaration, the unit as `x-unit`.
"""

from pathlib import Path
from typing import Any

import msgspec

from tools.protocol_docs import docs
from tools.protocol_docs.conversations import UNIONS, types_of
from tools.protocol_docs.notation import portable
from trainctl.protocol.messages import Message, verbs
from trainctl.protocol.messages.base import PROTOCOL_VERSION

DEFAULT_PATH = Path("docs/protocol.schema.json")
DIALECT = "https://json-schema.org/draft/2020-12/schema"
REFERENCE = "#/$defs/{name}"
DESCRIPTION = (
    "Every message, as the map in a frame's msgpack; docs/protocol.md and docs/protocol-agents.md say how they are "
    "used. Bytes are base64 text here. JSON has no form for a float that isn't finite: the golden vectors have null "
    "instead, and msgpack carries the float itself. Generated from the message types; don't edit it."
)
Schema = dict[str, Any]


def schema() -> Schema:
    """Return the whole document."""
    unions = {conversation_name(talk): union for talk, union in UNIONS.items()}
    arguments = [verb.args for verb in verbs.VERBS.values()]
    _, types = msgspec.json.schema_components([*unions.values(), *arguments], ref_template=REFERENCE)
    comments = docs.field_comments(*docs.SOURCES)
    for kind in [*_structs(), *arguments]:
        _describe(types[kind.__name__], kind, comments)
    _bind_verbs(types["Command"])
    conversations = {name: {"anyOf": _references(union)} for name, union in unions.items()}
    return {
        "$schema": DIALECT,
        "title": f"The trainctl protocol, version {PROTOCOL_VERSION}",
        "description": DESCRIPTION,
        "anyOf": [{"$ref": REFERENCE.format(name=name)} for name in conversations],
        "$defs": {**conversations, **types},
    }


def page() -> str:
    """The document as it stands in the file."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=1).decode() + "\n"


def conversation_name(talk: str) -> str:
    """The name under `$defs` of a conversation's union: `client-to-agent`."""
    return talk.replace(" ", "-")


# ---------------------------------------------------------------- one type


def _structs() -> list[type[msgspec.Struct]]:
    """Every struct that has a schema of its own: the parts of messages, and messages with a tag."""
    parts = docs.part_types()
    return [*parts, *(kind for talk in UNIONS for kind in types_of(talk))]


def _describe(found: Schema, kind: type[msgspec.Struct], comments: docs.Comments) -> None:
    """Give the fields their meaning, and the message its version; say nothing that only one kind of reader knows."""
    if meaning := docs.purpose(kind):
        found["description"] = meaning
    for name, field in found.get("properties", {}).items():
        if "description" not in field and (meaning := docs.comment(kind, name, comments)):
            field["description"] = meaning
    for field, place in zip(msgspec.structs.fields(kind), found.get("prefixItems", ()), strict=False):
        place["title"] = field.encode_name
        if meaning := docs.comment(kind, field.name, comments):
            place["description"] = meaning
    if issubclass(kind, Message):
        found["properties"]["v"] = {"const": PROTOCOL_VERSION, "description": "the protocol's version"}
        found["required"].append("v")
    for_any_language(found)


def for_any_language(found: Any) -> None:
    """Write patterns to end as in ECMA 262, and leave out the hint that only OpenAPI knows."""
    if isinstance(found, list):
        for part in found:
            for_any_language(part)
    elif isinstance(found, dict):
        found.pop("discriminator", None)
        if isinstance(found.get("pattern"), str):
            found["pattern"] = portable(found["pattern"])
        for part in found.values():
            for_any_language(part)


def _references(union: Any) -> list[Schema]:
    return [{"$ref": REFERENCE.format(name=kind.__name__)} for kind in union.__args__]


# ---------------------------------------------------------------- verbs


def _bind_verbs(command: Schema) -> None:
    """A command's arguments, and whether it is for a node, are those of its verb."""
    command["properties"]["verb"]["enum"] = list(verbs.VERBS)
    command["allOf"] = [_case(verb) for verb in verbs.VERBS.values()]


def _case(verb: verbs.Verb) -> Schema:
    then: Schema = {"properties": {"args": {"$ref": REFERENCE.format(name=verb.args.__name__)}}}
    required = [field.encode_name for field in msgspec.structs.fields(verb.args) if field.required]
    needed = [*(["args"] if required else []), *(["node"] if verb.needs_node else [])]
    if verb.needs_node:
        then["properties"]["node"] = {"type": "string"}
    elif not verb.takes_node:
        then["properties"]["node"] = {"type": "null"}
    if needed:
        then["required"] = needed
    return {"if": {"properties": {"verb": {"const": verb.name}}}, "then": then}
