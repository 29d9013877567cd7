"""Wire vectors: every message has some, they decode, and their bytes don't change while the version doesn't."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tools.protocol_docs import conversations, examples

from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.protocol.wire import codec

FILE = Path(__file__).resolve().parents[2] / "golden" / "wire.jsonl"
AGAIN = "write it with python -m tools.protocol_docs.examples"
VECTORS: list[dict[str, Any]] = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


@pytest.mark.parametrize("talk", conversations.UNIONS)
def test_every_message_type_has_an_example_under_its_tag(talk: str) -> None:
    kinds = {type(message) for message in examples.EXAMPLES[talk].values()}
    assert kinds == set(conversations.types_of(talk))
    for name, message in examples.EXAMPLES[talk].items():
        assert name.startswith(conversations.tag_of(type(message)))
        if isinstance(message, m.Command):
            verbs.check(message.verb, message.args, message.node)


def test_every_concrete_message_is_in_a_conversation() -> None:
    spoken = {kind for talk in conversations.UNIONS for kind in conversations.types_of(talk)}
    roots = {m.Message, m.Request, m.Reply}
    defined = {kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, m.Message)}
    assert defined - roots == spoken
    tags = [conversations.tag_of(kind) for talk in conversations.UNIONS for kind in conversations.types_of(talk)]
    assert len(set(tags)) == len(tags)


def test_vectors_are_those_of_the_examples() -> None:
    examples_by_name = {name: talk for talk, named in examples.EXAMPLES.items() for name in named}
    assert [vector["name"] for vector in VECTORS] == list(examples_by_name), (
        f"a vector is missing or left over: {AGAIN}"
    )
    for vector in VECTORS:
        name = vector["name"]
        assert vector == examples.vector(examples_by_name[name], name), f"{name} differs: {AGAIN}"


def test_each_vector_decodes_to_the_message_beside_it_in_its_conversation_alone() -> None:
    for vector in VECTORS:
        message = conversations.DECODERS[vector["conversation"]](bytes.fromhex(vector["frame"]))
        assert msgspec.json.decode(msgspec.json.encode(message)) == vector["message"], vector["name"]
        assert codec.encode(message).hex() == vector["frame"], vector["name"]
        talk, frame = vector["conversation"], bytes.fromhex(vector["frame"])
        own = {conversations.DECODERS[talk], *([codec.decode_control] if talk == "client to agent" else [])}
        for decode in {*conversations.DECODERS.values(), codec.decode_control} - own:
            with pytest.raises(codec.ProtocolError):
                decode(frame)
                pytest.fail(f"{talk}'s {vector['name']} is understood by {decode}")
