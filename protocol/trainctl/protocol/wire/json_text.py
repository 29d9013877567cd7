"""JSON in which a NaN or an infinity stays what it is.

JSON has no such numbers. They are the strings "NaN", "Infinity" and "-Infinity", as in Protobuf's JSON; null is only
what is unknown.
"""

import math
from typing import Any, TypeVar

import msgspec

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
