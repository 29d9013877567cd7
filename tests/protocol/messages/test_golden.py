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

ROOT = Path(__file__).resolve().parents[3]
WIRE = ROOT / "tests" / "golden" / "wire"
NAMES = [(talk, name) for talk, found in examples.EXAMPLES.items() for name in found]
AGAIN = "python -m tools.protocol_docs.examples tests/golden/wire"


def vector(name: str) -> dict[str, Any]:
    file = WIRE / f"{name}.json"
    assert file.is_file(), f"{name} has no golden vector; write it with {AGAIN}"
    return json.loads(file.read_text("utf-8"))


def without_nulls_for_nan(plain: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if not (name.endswith("-nan") and key == "loss")}


@pytest.mark.parametrize("talk", conversations.UNIONS)
def test_every_message_type_has_an_example_under_its_tag(talk: str) -> None:
    kinds = {type(message) for message in examples.EXAMPLES[talk].values()}
    assert kinds == set(conversations.types_of(talk))
    for name, message in examples.EXAMPLES[talk].items():
        assert name.startswith(conversations.tag_of(type(message)))


def test_every_concrete_message_is_in_a_conversation() -> None:
    spoken = {kind for talk in conversations.UNIONS for kind in conversations.types_of(talk)}
    roots = {m.Message, m.Request, m.Reply}
    defined = {kind for kind in vars(m).values() if isinstance(kind, type) and issubclass(kind, m.Message)}
    assert defined - roots == spoken


def test_tags_are_unique() -> None:
    tags = [conversations.tag_of(kind) for talk in conversations.UNIONS for kind in conversations.types_of(talk)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize(("talk", "name"), NAMES)
def test_bytes_are_those_of_the_vector(talk: str, name: str) -> None:
    kept = vector(name)
    assert kept["conversation"] == talk
    assert codec.encode(examples.EXAMPLES[talk][name]).hex() == kept["frame"]


@pytest.mark.parametrize(("talk", "name"), NAMES)
def test_vector_decodes_to_the_message_beside_it(talk: str, name: str) -> None:
    kept = vector(name)
    message = conversations.DECODERS[talk](bytes.fromhex(kept["frame"]))
    plain = msgspec.json.decode(msgspec.json.encode(message))
    assert without_nulls_for_nan(plain, name) == without_nulls_for_nan(kept["message"], name)
    assert codec.encode(message).hex() == kept["frame"]


@pytest.mark.parametrize(("talk", "name"), NAMES)
def test_other_conversations_refuse_it(talk: str, name: str) -> None:
    frame = bytes.fromhex(vector(name)["frame"])
    for decode in {*conversations.DECODERS.values(), codec.decode_request}:
        if decode is not conversations.DECODERS[talk] and (decode, talk) != (codec.decode_request, "client to agent"):
            with pytest.raises(codec.ProtocolError):
                decode(frame)


def test_no_vector_is_left_of_a_message_that_is_gone() -> None:
    assert {file.stem for file in WIRE.glob("*.json")} == {name for _, name in NAMES}


def test_example_commands_are_valid() -> None:
    for message in examples.EXAMPLES["client to agent"].values():
        if isinstance(message, m.Command):
            verbs.check(message.verb, message.args, message.node)


def test_written_vectors_are_those_kept(tmp_path: Path) -> None:
    (tmp_path / "gone.json").write_text("{}")
    examples.write(tmp_path)
    assert {file.name: file.read_text("utf-8") for file in tmp_path.iterdir()} == {
        file.name: file.read_text("utf-8") for file in WIRE.iterdir()
    }
