"""Takes out of a report what identifies a machine or a person. Pure but for `redactor`, which reads this machine's."""

import getpass
import ipaddress
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

_COMMON: Final = frozenset(
    {"root", "user", "localhost", "local", "admin", "mac", "linux", "darwin", "debian", "ubuntu"}
)
"""Names that identify nobody."""
_PATTERNS: Final = tuple((re.compile(pattern), instead) for pattern, instead in (
    (r"(?:GPU-|MIG-)?\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "<uuid>"),
    (r"(?i)(serial[\w ()-]*\"?\s*[:=]\s*)\"?[^\s\",]+\"?", r"\1<serial>"),
    (r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b", "<mail>"),
    (r"(?<![\w:.])(?:[0-9a-fA-F]{1,2}[:-]){5}[0-9a-fA-F]{1,2}(?![\w:])", "<mac>"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?:/\d{1,2})?", "<ip>"),
    (r"(?<![\w.<>/:])/(?:[\w.@+~%=-]+/)*[\w.@+~%=-]+/?", "<path>"),
))  # fmt: skip
_COLONS: Final = re.compile(r"(?<![\w:.])[0-9a-fA-F:]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%\w+)?(?:/\d{1,3})?")
"""Text that may be an IPv6 address; times of day look alike."""


def redactor() -> Callable[[str], str]:
    """Return a function that redacts this machine's and its user's names."""
    host = socket.gethostname()
    return lambda text: redacted(text, {host, host.partition(".")[0], getpass.getuser(), Path.home().name})


def redacted_value(value: object, redact: Callable[[str], str]) -> object:
    """Return a value of JSON with each text in it redacted, line by line; keys too."""
    if isinstance(value, dict):
        return {redact(str(key)): redacted_value(item, redact) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted_value(item, redact) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return "\n".join(map(redact, str(value).splitlines()))


def redacted(text: str, names: Iterable[str]) -> str:
    """Return the text without whole words that are `names`, and without paths, addresses, mail and serial numbers."""
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 2 and name.lower() not in _COMMON:
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", "<name>", text, flags=re.IGNORECASE)
    text = _COLONS.sub(_without_address, text)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def _without_address(match: re.Match[str]) -> str:
    try:
        ipaddress.IPv6Interface(match[0].partition("%")[0].partition("/")[0])
    except ValueError:
        return match[0]
    return "<ip>"
