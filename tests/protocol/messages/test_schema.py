"""The JSON Schema and the pages of the protocol, which are made from the message types."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tests.protocol.support import strategies
from tools.protocol_docs import conversations, docs, examples, schema

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.protocol.wire import codec

ROOT = Path(__file__).parents[3]
DOCUMENT: dict[str, Any] = schema.schema()
VALIDATORS = {
    talk: Draft202012Validator({**DOCUMENT, "anyOf": [{"$ref": f"#/$defs/{schema.conversation_name(talk)}"}]})
    for talk in conversations.UNIONS
}
VECTORS = ROOT / "tests" / "golden" / "wire.jsonl"
COMMANDS = VALIDATORS["client to agent"]


def as_json(value: Any) -> Any:
    """Return the content of a frame with its bytes as the schema has them."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, list):
        return [as_json(item) for item in value]
    return {key: as_json(item) for key, item in value.items()} if isinstance(value, dict) else value


def command(**changes: Any) -> dict[str, Any]:
    found = {**msgspec.to_builtins(examples.EXAMPLES["client to agent"]["command-bare"]), **changes}
    return {name: value for name, value in found.items() if value is not ...}


def test_every_golden_vector_is_a_message_of_its_conversation_and_of_no_type_else() -> None:
    Draft202012Validator.check_schema(DOCUMENT)
    any_message = Draft202012Validator(DOCUMENT)
    for line in VECTORS.read_text("utf-8").splitlines():
        vector = json.loads(line)
        name, validator = vector["name"], VALIDATORS[vector["conversation"]]
        message = as_json(msgpack.unpackb(bytes.fromhex(vector["frame"])))
        assert validator.is_valid(message), f"{name}: {next(validator.iter_errors(message), None)}"
        for changed in ({**message, "type": "unheard-of"}, {**message, "v": 1}, {**message, "v": None}):
            assert not validator.is_valid(changed), f"{name}: {changed}"
        assert not any_message.is_valid({key: value for key, value in message.items() if key != "v"}), name


@pytest.mark.parametrize("talk", ["client to agent", "agent to client", "published by an agent"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_this_program_says_is_valid(talk: str, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([kind for kind in conversations.types_of(talk) if kind.__name__ != "Command"]))
    message = data.draw(strategies.of(kind, finite=False))
    VALIDATORS[talk].validate(as_json(msgpack.unpackb(codec.encode(message))))


def test_it_takes_the_commands_that_an_agent_takes() -> None:
    commands: tuple[tuple[str, dict[str, Any], str | None], ...] = (
        ("start-run", {"resume": "old"}, None),
        ("resize-batch", {"micro": 4}, "studio"),
        ("resize-batch", {"micro": 0}, None),
        ("resize-batch", {"micro": 4, "macro": 1}, None),
        ("rebalance", {"shares": {"studio": 16, "mbp": "30%"}}, None),
        ("rebalance", {"shares": {"studio": "30 %"}}, None),
        ("rebalance", {"auto": True}, "studio"),
        ("drain", {}, None),
        ("mute", {"kind": "disk", "minutes": 5}, "studio"),
        ("unheard-of", {}, None),
    )
    for verb, args, node in commands:
        try:
            verbs.check(verb, args, node)
        except InvalidInputError:
            is_taken = False
        else:
            is_taken = True
        assert COMMANDS.is_valid(command(verb=verb, args=args, node=node)) is is_taken
    assert COMMANDS.is_valid(command())
    for changes in ({"id": "7"}, {"id": ...}, {"rid": ""}, {"ttl_seconds": 0}, {"if_plan": -1}, {"extra": 1}):
        assert not COMMANDS.is_valid(command(**changes)), changes


def test_every_field_is_explained() -> None:
    """All but the tags, whose only value is the type's name."""
    unexplained = [
        f"{name}.{field}"
        for name, kind in DOCUMENT["$defs"].items()
        for field, about in [
            *kind.get("properties", {}).items(),
            *((place["title"], place) for place in kind.get("prefixItems", ())),
        ]
        if not about.get("description") and len(about.get("enum", ())) != 1
    ]
    assert unexplained == []


@pytest.mark.parametrize("path", [docs.CLIENTS, docs.AGENTS], ids=["clients", "agents"])
def test_every_row_of_a_page_has_a_meaning_without_names_of_python(path: Path) -> None:
    text = docs.page(path)
    rows = re.findall(r"^\|+`([\w-]+)`\|.*\|(.*)\|$", text, flags=re.MULTILINE)
    assert rows and [name for name, meaning in rows if not meaning.strip()] == []
    assert re.findall(r"\b(None|True|False|METRICS|msgspec|struct|dict|tuple|str\.|int\.|python -m)\b", text) == []
