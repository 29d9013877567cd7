"""What must not be in a file that people share: names of the machine and its user, paths, addresses and keys. Pure."""

import ipaddress
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

_LEAST_LETTERS: Final = 3
"""A shorter name is left: it would be part of ordinary text."""
_COMMON: Final = frozenset(
    {"root", "user", "localhost", "localdomain", "local", "admin", "mac", "none",
     "cpu", "cuda", "darwin", "debian", "fedora", "gpu", "home", "lan", "linux", "mlx", "nvidia", "torch", "ubuntu"}
)  # fmt: skip
"""Names that identify no one, or are words of any report."""
_PATTERNS: Final = tuple((re.compile(pattern), instead) for pattern, instead in (
    (r"(?:GPU-|MIG-)?\b[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b", "<uuid>"),
    (r"(?i)(serial[\w ()-]*\"?\s*[:=]\s*)\"?[^\s\",]+\"?", r"\1<serial>"),
    (r"(?i)(\b(?:PDI|GUID)\"?\s*[:=]\s*)\"?[^\s\",]+\"?", r"\1<id>"),
    (r"(?i)(?<=\(id=)\d+(?=\))", "<id>"),
    (r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b", "<mail>"),
    (r"(?<![\w:.])(?:[0-9a-fA-F]{1,2}[:-]){5}[0-9a-fA-F]{1,2}(?![\w:])", "<mac>"),
    (r"\b(enx|wlx|wwx)[0-9a-f]{12}\b", r"\1<mac>"),
    (r"\b\d{1,3}(?:\.\d{1,3}){3}\b(?:/\d{1,2})?", "<ip>"),
    (r"(?<![\w.<>/:])~?/(?:[\w.@+~%=-]+/)*[\w.@+~%=-]+/?", "<path>"),
    (r"<path>(?:/[\w.@+~%=-]+)+/?", "<path>"),
    (r"(?<=://)/(?:[\w.@+~%=-]+/)*[\w.@+~%=-]+/?", "<path>"),
    (r"(?<!\S)(?=\S*[^0-9A-Za-z]|\S*[0-9])[0-9A-Za-z.:+=^!/*?&<>()\[\]{}@%$#-]{40}(?!\S)", "<key>"),
))  # fmt: skip
_SIX: Final = re.compile(r"(?<![\w:.])[0-9a-fA-F:]*:[0-9a-fA-F:.]*:[0-9a-fA-F:.]*(?:%\w+)?(?:/\d{1,3})?")
"""What may be an IPv6 address; times of day look alike."""


def redactor(names: Iterable[str], secrets: Iterable[str] = ()) -> Callable[[str], str]:
    """A function that takes out of a text: `names` (of hosts and users) as whole words, `secrets` (folders, keys)
    wherever they are, and all that looks like a path, an address, an identifier or a key."""
    words = sorted({name for name in names if _identifies(name)}, key=len, reverse=True)
    hidden = sorted({secret for secret in secrets if len(secret) > _LEAST_LETTERS}, key=len, reverse=True)
    named = re.compile("|".join(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])" for word in words), re.IGNORECASE)

    def redact(text: str) -> str:
        for secret in hidden:
            text = _without_secret(text, secret)
        text = without_patterns(text)
        return named.sub("<name>", text) if words else text

    return redact


def without_patterns(text: str) -> str:
    """A text without what looks like a path, an address, an identifier or a key. Names stay."""
    text = _SIX.sub(_without_address, text)
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


def redacted(value: Any, redact: Callable[[str], str]) -> Any:
    """A value of JSON with each text in it redacted. Keys are the report's own words, or names of interfaces: from
    these only patterns are taken out, whatever the machine's name is."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {without_patterns(str(key)): redacted(item, redact) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(item, redact) for item in value]
    return value


def _without_secret(text: str, secret: str) -> str:
    """A folder is taken out only as a whole: `/usr` is no part of `/usrdata`."""
    if secret.startswith("/"):
        return re.sub(rf"{re.escape(secret)}(?!\w)", "<path>", text)
    return text.replace(secret, "<secret>")


def _identifies(name: str) -> bool:
    return len(name) >= _LEAST_LETTERS and name.lower() not in _COMMON


def _without_address(found: re.Match[str]) -> str:
    try:
        ipaddress.IPv6Interface(found[0].partition("%")[0].partition("/")[0])
    except ValueError:
        return found[0]
    return "<ip>"
