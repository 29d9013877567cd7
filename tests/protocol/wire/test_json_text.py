"""JSON that keeps each number, and that a terminal can show."""

import json
import math

import msgspec
import pytest

from trainctl.protocol.wire.codec import decode_json, encode_json


class Kept(msgspec.Struct):
    value: float | None
    text: str = ""


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, 1e15, 0.0])
def test_a_number_is_read_as_it_was(value: float | None) -> None:
    read = decode_json(encode_json(Kept(value)), Kept).value
    assert read == value or (value is not None and math.isnan(value) and read is not None and math.isnan(read))


def test_a_terminal_obeys_no_character() -> None:
    text = "a\x1b[2J\x9b31m\x7f\u2028é"
    made = encode_json({"text": text})
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in made)
    assert json.loads(made) == {"text": text}
