"""Bytes to messages and back, with every size capped before a message type is looked at; and JSON that keeps NaN."""

import math
from typing import Any, Final, TypeVar

import msgpack
import msgspec

from trainctl.protocol.errors import ProtocolError, VersionError
from trainctl.protocol.messages import (
    AgentReply,
    ClientRequest,
    FromPeer,
    FromTrainer,
    Heartbeat,
    Kept,
    Live,
    Message,
    RunSteps,
    ToPeer,
    ToTrainer,
    WorkAsk,
    WorkSlice,
)
from trainctl.protocol.messages.base import PROTOCOL_VERSION

CONTROL_FRAME_BYTES = 64 * 1024
"""Largest frame an agent takes from a client."""
FRAME_BYTES = 1024 * 1024
"""Largest frame on any other socket."""
MAX_DEPTH = 8

CONTROL_CAPS: dict[str, Any] = {
    "max_str_len": 4096,
    "max_bin_len": 65536,
    "max_array_len": 4096,
    "max_map_len": 256,
    "max_ext_len": 0,
}
BULK_CAPS: dict[str, Any] = {**CONTROL_CAPS, "max_str_len": 262144 * 4, "max_array_len": 16384}
"""Limits inside a frame from a client and from elsewhere, as msgpack names them."""

_RUN_STEPS: Final = RunSteps.__struct_config__.tag
"""The only type from clients that carries metrics."""
_MAY_BE_NAN: Final = frozenset({"loss", "grad_norm", "learning_rate", "values"})
"""Fields of such a message whose numbers need not be finite."""
_SHORT_BYTES = 4096
"""Bytes up to which a frame is within all limits but those of ignored fields, which are not read."""
_LIVE: Any = msgspec.msgpack.Decoder(Live | Heartbeat)
_ANSWER: Any = msgspec.msgpack.Decoder(FromTrainer | WorkAsk)
STORED_VERSIONS: Final = (1, 2)
"""Protocol versions whose plans and readings in a record can be read."""
_VERSIONED = msgspec.msgpack.encode({"v": PROTOCOL_VERSION})[1:]
"""Start of every message of this version."""


def encode(message: Message) -> bytes:
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


def decode_live(frame: bytes) -> Live | Heartbeat:
    """Decode what an agent published; unknown fields are ignored and NaN may appear. Raises ProtocolError."""
    message: Live | Heartbeat | None = _short(frame, _LIVE)
    return message or _convert(_unpack(frame, FRAME_BYTES, CONTROL_CAPS), Live | Heartbeat)


def decode_control(frame: bytes) -> ClientRequest | ToPeer:
    """Decode what comes to an agent's socket for requests, from a client or from another agent. Raises
    ProtocolError."""
    return _control(frame, ClientRequest | ToPeer)  # type: ignore[no-any-return]


def decode_peer(frame: bytes) -> FromPeer:
    """A message from a follower's agent to the lead's. Raises ProtocolError."""
    return _bulk(frame, FromPeer)  # type: ignore[no-any-return]


def decode_kept(frame: bytes) -> Kept:
    """One thing that a lead has kept of a run and hands on; NaN may appear. Raises ProtocolError."""
    return _bulk(frame, Kept)  # type: ignore[no-any-return]


def decode_reply(frame: bytes) -> AgentReply:
    """Decode what an agent answered. Raises ProtocolError."""
    return _bulk(frame, AgentReply)  # type: ignore[no-any-return]


def decode_order(frame: bytes) -> ToTrainer | WorkSlice:
    """A message from an agent to a trainer or worker. Raises ProtocolError."""
    return _bulk(frame, ToTrainer | WorkSlice)  # type: ignore[no-any-return]


def decode_answer(frame: bytes) -> FromTrainer | WorkAsk:
    """Decode a message from a trainer or worker to its agent. Raises ProtocolError."""
    message: FromTrainer | WorkAsk | None = _short(frame, _ANSWER)
    return message or _bulk(frame, FromTrainer | WorkAsk)


def _short(frame: bytes, decoder: Any) -> Any:
    """Return the message of a short frame of this version, in one pass; None where it takes the long way, which also
    says what is wrong with a frame."""
    if len(frame) > _SHORT_BYTES or _VERSIONED not in frame:
        return None
    try:
        message = decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return message if message.v == PROTOCOL_VERSION else None


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


def _peek(frame: bytes, field: str, max_characters: int) -> str:
    try:
        raw = _unpack(frame, CONTROL_FRAME_BYTES, CONTROL_CAPS)
    except ProtocolError:
        return ""
    text = raw.get(field)
    return text if isinstance(text, str) and len(text) <= max_characters else ""


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
        text = f"protocol version {version!r} is not supported; this program uses {PROTOCOL_VERSION}"
        raise VersionError(f"{text}: upgrade the older one")
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


T = TypeVar("T")
_CONTROLS = {code: f"\\u{code:04x}" for code in range(0x7F, 0xA0)}
"""Escapes of the control characters that JSON permits in strings."""


def encode_json(value: Any) -> str:
    """Return a value as JSON on one line, with no character that a terminal obeys."""
    return printable(msgspec.json.encode(with_names(msgspec.to_builtins(value))).decode())


def printable(text: str) -> str:
    """Return JSON with its control characters escaped."""
    return text.translate(_CONTROLS)


def decode_json(text: str, kind: type[T]) -> T:
    """Return a value of a type from its JSON. Raises msgspec.DecodeError."""
    return msgspec.json.decode(text, type=kind, strict=False)


def with_names(value: Any) -> Any:
    """Return plain values with the names of numbers that JSON lacks, and with text that UTF-8 can write."""
    if isinstance(value, str):
        return value if value.isascii() else _as_written(value)
    if isinstance(value, dict):
        return {with_names(name): with_names(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_names(item) for item in value]
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _as_written(text: str) -> str:
    """Return text with the bytes that the locale's encoding lacks, as in names of files, read as UTF-8."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
