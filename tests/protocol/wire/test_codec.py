"""The codec: what is said arrives, and whatever else arrives is a ProtocolError that names the reason."""

import contextlib
import gc
import itertools
import json
import math
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.protocol.support import strategies
from tests.protocol.support.mutations import Mutator
from tests.tiers import scale
from tools.protocol_docs import conversations, examples

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ProtocolError, VersionError
from trainctl.protocol.wire import codec
from trainctl.protocol.wire.codec import decode_json, encode_json

KINDS = [(talk, kind) for talk in conversations.UNIONS for kind in conversations.types_of(talk)]
ALL = [*dict.fromkeys(conversations.DECODERS.values()), codec.decode_control]
OFTEN = settings(max_examples=40, deadline=None)
EACH = settings(max_examples=15, deadline=None)
"""For what is done to every one of the messages' types."""
COMMAND = examples.EXAMPLES["client to agent"]["command"]


def plain(**changes: Any) -> dict[str, Any]:
    return {**msgspec.to_builtins(COMMAND), **changes}


def packed(value: Any) -> bytes:
    frame: bytes = msgpack.packb(value)
    return frame


def refused(frame: bytes, why: str, decode: Callable[[bytes], Any] = codec.decode_control) -> None:
    with pytest.raises(ProtocolError, match=why):
        decode(frame)


@pytest.mark.parametrize(("talk", "kind"), KINDS, ids=lambda value: getattr(value, "__name__", ""))
@EACH
@given(data=st.data())
def test_round_trip(talk: str, kind: type[m.Message], data: st.DataObject) -> None:
    message = data.draw(strategies.of(kind, finite=talk in ("client to agent", "lead to follower")))
    assert conversations.DECODERS[talk](codec.encode(message)) == message


NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats()
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | strategies.TEXT | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strategies.TEXT, inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize("talk", conversations.DECODERS)
@OFTEN
@given(data=st.data())
def test_a_message_with_one_field_replaced_is_read_or_refused(talk: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(examples.EXAMPLES[talk])))
    fields = msgspec.to_builtins(examples.EXAMPLES[talk][name])
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(JSON)
    try:
        read = conversations.DECODERS[talk](packed(fields))
    except ProtocolError as error:
        assert str(error) and "\n" not in str(error)
    else:
        assert isinstance(read, m.Message)


def test_largest_frame_from_a_client() -> None:
    padding = codec.CONTROL_FRAME_BYTES - len(packed(plain(args={"a": ""}))) - 2
    texts = ["x" * 4096] * (padding // 4100)
    frame = packed(plain(args={"a": texts}))
    assert len(frame) <= codec.CONTROL_FRAME_BYTES
    codec.decode_control(frame)
    refused(packed(plain(args={"a": [*texts, *texts[:2]]})), "the limit is 65,536")


def test_largest_frame_elsewhere() -> None:
    refused(b"\x80" * (codec.FRAME_BYTES + 1), "the limit is 1,048,576", codec.decode_reply)
    runs = msgspec.to_builtins(examples.EXAMPLES["agent to client"]["runs"])
    refused(packed({**runs, "added": b"x" * 65_537}), "within limits", codec.decode_reply)
    with pytest.raises(ProtocolError, match=r"LogPart is .* the frame limit"):
        codec.encode(m.LogPart(rid="1", run=None, rank=0, offset_bytes=0, size_bytes=0, text="x" * codec.FRAME_BYTES))


def test_caps_of_what_a_client_sends() -> None:
    keys = {str(key): 0 for key in range(257)}
    extensions = (msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2))  # a timestamp is not read as a date
    for value in ("x" * 4097, [0] * 4097, keys, *extensions, {1: 2}):
        refused(packed(plain(args={"a": value})), "not a msgpack message within limits")
    del keys["0"]
    for value in ("x" * 4096, [0] * 4096, keys, b"x" * 40000):
        assert codec.decode_control(packed(plain(args={"a": value}))).args == {"a": value}  # type: ignore[union-attr]


def test_nesting() -> None:
    def nested(levels: int) -> Any:
        return [] if levels == 1 else [nested(levels - 1)]

    codec.decode_control(packed(plain(args={"a": nested(codec.MAX_DEPTH - 2)})))
    refused(packed(plain(args={"a": nested(codec.MAX_DEPTH)})), "nested more than 8 levels deep")
    refused(b"\x91" * 60_000 + b"\x90", "not a msgpack message")
    refused(b"\x91" * 60_000 + b"\x90", "not a msgpack message", codec.decode_reply)


def test_numbers_of_a_command_are_finite_and_telemetry_may_hold_nan() -> None:
    for value in (float("nan"), float("inf"), float("-inf")):
        refused(packed(plain(args={"a": {"b": [value]}})), "where a finite number is required")
        refused(packed(plain(issued_at=value)), "where a finite number is required")
    step = codec.decode_live(codec.encode(examples.EXAMPLES["published by an agent"]["step-committed-nan"]))
    assert isinstance(step, m.StepCommitted)
    assert step.loss != step.loss


def test_a_bad_or_missing_field_is_named() -> None:
    for changes, why in (
        ({"type": "no-such"}, "no-such"),
        ({"type": 7}, "str"),
        ({"type": "step-plan"}, "step-plan"),
        ({"extra": 1}, "extra"),
        ({"verb": 7}, "verb"),
        ({"args": [1]}, "args"),
        ({"id": "not-a-uuid"}, "id"),
        ({"rid": ""}, "rid"),
        ({"rid": "x" * 65}, "rid"),
        ({"by": "x" * 65}, "by"),
        ({"if_plan": -1}, "if_plan"),
        ({"ttl_seconds": 0}, "ttl_seconds"),
        ({"ttl_seconds": 86401}, "ttl_seconds"),
    ):
        refused(packed(plain(**changes)), why)
    for field in ("rid", "id", "verb"):
        refused(packed({name: value for name, value in plain().items() if name != field}), field)


def test_unknown_fields_are_ignored_in_what_an_agent_says() -> None:
    for talk in ("agent to client", "published by an agent", "agent to trainer", "trainer to agent"):
        for message in examples.EXAMPLES[talk].values():
            fields = {**msgspec.to_builtins(message), "added_later": [1]}
            assert codec.encode(conversations.DECODERS[talk](packed(fields))) == codec.encode(message)


def test_other_versions_are_refused() -> None:
    for decode, version in itertools.product(ALL, (0, 1, -1, "2", None, True, 1.5, [1])):
        with pytest.raises(ProtocolError if version is True else VersionError):
            decode(packed(plain(v=version)))
            pytest.fail(f"{decode} takes version {version}")
    with pytest.raises(VersionError, match="None is not supported; this program uses 2"):
        codec.decode_control(packed({name: value for name, value in plain().items() if name != "v"}))


def test_only_a_whole_map_is_a_message() -> None:
    for value in (None, 1, "text", [1], b"bytes", True, 1.5):
        refused(packed(value), "a message must be a map")
    refused(packed(plain()) + b"\x00", "not a msgpack message")
    refused(packed(plain()).replace(b"anna", b"an\xff\xff"), "not a msgpack message")


def test_the_request_id_of_a_malformed_request_is_read_or_empty() -> None:
    assert codec.peek_rid(packed(plain(verb=7))) == plain()["rid"]
    assert codec.peek_rid(packed({"rid": "r", "v": 99})) == "r"
    for frame in (b"", b"\xc1", packed([1]), packed({"rid": 7}), packed({"rid": "x" * 65}), packed({})):
        assert codec.peek_rid(frame) == ""


def test_agents_may_send_more_than_a_client_may() -> None:
    """The table in docs/protocol.md gives 1,048,576 bytes for a string elsewhere, and 16,384 items for an array."""

    def history(buckets: int) -> m.History:
        column = (1.5,) * buckets
        steps = tuple(range(buckets))
        return m.History(rid="1", series=(m.Series("loss", None, 1, steps, column, column, column, column),))

    log = m.LogPart(rid="1", run=None, rank=0, offset_bytes=0, size_bytes=10**6, text="x" * 10**6)
    value = m.KeptValue(key="toml", value="x" * 10**6)
    assert codec.decode_reply(codec.encode(log)) == log
    assert codec.decode_kept(codec.encode(value)) == value
    assert codec.decode_reply(codec.encode(history(16_384))) == history(16_384)
    refused(codec.encode(history(16_385)), "within limits", codec.decode_reply)


def test_lists_that_must_match_in_length_are_compared_when_they_arrive() -> None:
    raw = msgpack.packb({"v": 2, "type": "kept-drifts", "step": 1, "at": 1.0, "ranks": [0, 1], "drifts": [0.5]})
    with pytest.raises(ProtocolError, match="differ in length"):
        codec.decode_kept(raw)


FRAMES = scale("frames")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("talk", conversations.DECODERS)
def test_a_mutated_frame_is_read_or_refused_in_a_line(talk: str) -> None:
    read, others = 0, {*conversations.DECODERS.values(), codec.decode_control}
    for number, frame in enumerate(Mutator(talk, 1).frames(FRAMES)):
        for decode in others if number % 10 == 0 else ():
            with contextlib.suppress(ProtocolError):
                decode(frame)
        try:
            message = conversations.DECODERS[talk](frame)
        except ProtocolError as error:
            assert str(error) and "\n" not in str(error), (number, frame)
        else:
            read += isinstance(message, m.Message)
        assert len(codec.peek_rid(frame)) <= 64
    assert 0 < read < FRAMES / 2, "what is mutated is neither all the same nor all noise"


def test_refusals_leave_nothing_in_memory() -> None:
    frames = list(Mutator("client to agent", 2).frames(500))

    def refuse() -> None:
        for frame in frames:
            with contextlib.suppress(ProtocolError):
                codec.decode_control(frame)

    refuse()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(4):
            refuse()
        gc.collect()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 100_000
    assert peak - before < 2_000_000


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
