"""Bytes to messages and back, with every size capped before a message type is looked at."""

import math
from typing import Any, Final

import msgpack
import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.errors import ProtocolError, VersionError
from trainctl.protocol.messages.base import PROTOCOL_VERSION

CONTROL_FRAME_BYTES = 64 * 1024
"""Largest frame an agent takes from a client."""
FRAME_BYTES = 1024 * 1024
"""Largest frame on any other socket."""
MAX_DEPTH = 8

CONTROL_CAPS: dict[str, Any] = {
    "max_str_len": 4096, "max_bin_len": 65536, "max_array_len": 4096, "max_map_len": 256, "max_ext_len": 0,
}  # fmt: skip
BULK_CAPS: dict[str, Any] = {**CONTROL_CAPS, "max_str_len": 262144 * 4, "max_array_len": 16384}
"""Limits inside a frame from a client and from elsewhere, as msgpack names them."""

_RUN_STEPS: Final = m.RunSteps.__struct_config__.tag
"""Of all that clients send, the type that carries metrics."""
_MAY_BE_NAN: Final = frozenset({"loss", "grad_norm", "learning_rate", "values"})
"""Fields of such a message whose numbers need not be finite."""
_SHORT_BYTES = 4096
"""Bytes up to which a frame is within all limits but those of ignored fields, which are not read."""
_LIVE: Any = msgspec.msgpack.Decoder(m.Live | m.Heartbeat)
STORED_VERSIONS: Final = (1, 2)
"""Protocol versions whose plans and readings in a record can be read."""
_VERSIONED = msgspec.msgpack.encode({"v": PROTOCOL_VERSION})[1:]
"""Start of every message of this version."""


def encode(message: m.Message) -> bytes:
    """One frame. Raises ProtocolError if it would be over FRAME_BYTES or a value in it can't be a msgpack one."""
    try:
        frame = msgspec.msgpack.encode(message)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise ProtocolError(f"{type(message).__name__} contains a value that msgpack cannot encode: {error}") from None
    if len(frame) > FRAME_BYTES:
        raise ProtocolError(
            f"{type(message).__name__} is {len(frame):,} bytes long; the frame limit is {FRAME_BYTES:,}"
        )
    return frame


def decode_live(frame: bytes) -> m.Live | m.Heartbeat:
    """What an agent published; unknown fields are ignored and NaN may appear. Raises ProtocolError."""
    if len(frame) <= _SHORT_BYTES and _VERSIONED in frame:
        try:
            known: m.Live | m.Heartbeat = _LIVE.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass  # the way below finds out what is wrong with it
        else:
            if known.v == PROTOCOL_VERSION:
                return known
    message: m.Live | m.Heartbeat = _convert(_unpack(frame, FRAME_BYTES, CONTROL_CAPS), m.Live | m.Heartbeat)
    return message


def decode_control(frame: bytes) -> m.ClientRequest | m.ToPeer:
    """What comes to an agent's socket for requests, from a client or from another agent. Raises ProtocolError."""
    return _control(frame, m.ClientRequest | m.ToPeer)  # type: ignore[no-any-return]


def decode_peer(frame: bytes) -> m.FromPeer:
    """A message from a follower's agent to the lead's. Raises ProtocolError."""
    return _bulk(frame, m.FromPeer)  # type: ignore[no-any-return]


def decode_kept(frame: bytes) -> m.Kept:
    """One thing that a lead has kept of a run and hands on; NaN may appear. Raises ProtocolError."""
    return _bulk(frame, m.Kept)  # type: ignore[no-any-return]


def decode_reply(frame: bytes) -> m.AgentReply:
    """What an agent answered. Raises ProtocolError."""
    return _bulk(frame, m.AgentReply)  # type: ignore[no-any-return]


def decode_order(frame: bytes) -> m.ToTrainer | m.WorkSlice:
    """A message from an agent to a trainer or worker. Raises ProtocolError."""
    return _bulk(frame, m.ToTrainer | m.WorkSlice)  # type: ignore[no-any-return]


def decode_answer(frame: bytes) -> m.FromTrainer | m.WorkAsk:
    """A message from a trainer or worker to its agent. Raises ProtocolError."""
    return _bulk(frame, m.FromTrainer | m.WorkAsk)  # type: ignore[no-any-return]


def decode_stored(frame: bytes, union: Any) -> Any:
    """A message of these types that a record keeps, of this version or of one that had the same fields. Raises
    ProtocolError."""
    raw = _unpack(frame, FRAME_BYTES, BULK_CAPS)
    return _convert({**raw, "v": PROTOCOL_VERSION} if raw.get("v") in STORED_VERSIONS else raw, union)


def peek_rid(frame: bytes) -> str:
    """The request id in a frame that may be malformed, so that a refusal can be addressed; else an empty string."""
    return _peek(frame, "rid", 64)


def peek_link(frame: bytes) -> str:
    """The conversation that a frame of another agent, which may be malformed, is of; else an empty string."""
    return _peek(frame, "link", 200)


def _peek(frame: bytes, field: str, most_characters: int) -> str:
    try:
        raw = _unpack(frame, CONTROL_FRAME_BYTES, CONTROL_CAPS)
    except ProtocolError:
        return ""
    text = raw.get(field)
    return text if isinstance(text, str) and len(text) <= most_characters else ""


def _control(frame: bytes, union: Any) -> Any:
    raw = _unpack(frame, CONTROL_FRAME_BYTES, CONTROL_CAPS)
    _check_depth(raw, 0)
    _check_finite(raw, _MAY_BE_NAN if raw.get("type") == _RUN_STEPS else frozenset())
    return _convert(raw, union)


def _bulk(frame: bytes, union: Any) -> Any:
    return _convert(_unpack(frame, FRAME_BYTES, BULK_CAPS), union)


def _unpack(frame: bytes, limit: int, caps: dict[str, Any]) -> dict[str, Any]:
    if len(frame) > limit:
        raise ProtocolError(f"the frame has {len(frame):,} bytes; the limit is {limit:,}")
    try:
        raw = msgpack.unpackb(frame, raw=False, strict_map_key=True, **caps)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"not a msgpack message within limits: {error or type(error).__name__}") from None
    if not isinstance(raw, dict):
        raise ProtocolError(f"a message must be a map, not {type(raw).__name__}")
    return raw


def _convert(raw: dict[str, Any], union: Any) -> Any:
    version = raw.get("v")
    if version != PROTOCOL_VERSION:
        raise VersionError(f"protocol version {version!r} is not supported; this program uses {PROTOCOL_VERSION}")
    try:
        return msgspec.convert(raw, union)
    except msgspec.ValidationError as error:
        raise ProtocolError(str(error)) from None


def _check_depth(value: Any, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for item in value.values():
            _check_depth(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            _check_depth(item, depth + 1)


def _check_finite(value: Any, but: frozenset[str] = frozenset()) -> None:
    """`but`: names of fields, at any depth, that may hold what is not finite."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ProtocolError(f"found {value} where a finite number is required")
    if isinstance(value, dict):
        for name, item in value.items():
            if name not in but:
                _check_finite(item, but)
    elif isinstance(value, list):
        for item in value:
            _check_finite(item, but)
