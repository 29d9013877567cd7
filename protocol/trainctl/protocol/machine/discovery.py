"""Discovery of agents by multicast DNS (RFC 6763), for `trainctl cluster discover`: their addresses, and no secret.

No one is bound to tell the truth there, so keys are never taken from it: the fingerprint only says which key to expect.
"""

import base64
import hashlib
from collections.abc import Mapping
from typing import NamedTuple

from trainctl.protocol.messages.base import PROTOCOL_VERSION

SERVICE = "_trainctl._tcp.local."
MAX_CHARACTERS = 128


class Advert(NamedTuple):
    """One agent as it is advertised."""

    node: str
    address: str  # tcp://host:port where it takes requests
    version: str  # of the program
    protocol: str
    fingerprint: str  # of its public key; empty: it has none


def fingerprint(public: str) -> str:
    """Return the fingerprint of a public key as keys are written (Z85), in the form that ssh-keygen uses."""
    digest = hashlib.sha256(public.encode()).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def properties(node: str, version: str, public: str) -> dict[str, str]:
    """The TXT record of an agent; `public` is empty for one without keys."""
    key = {"key": fingerprint(public)} if public else {}
    return {"node": node, "version": version, "protocol": str(PROTOCOL_VERSION)} | key


def advert(host: str, port: int, told: Mapping[bytes, bytes | None]) -> Advert:
    """Return what a TXT record says, made safe to show: anyone can send one."""
    text = {name: _shown(told.get(name.encode())) for name in ("node", "version", "protocol", "key")}
    name = f"[{host}]" if ":" in host else host
    return Advert(text["node"], f"tcp://{name}:{port}", text["version"], text["protocol"], text["key"])


def _shown(raw: bytes | None) -> str:
    text = (raw or b"").decode("utf-8", "replace")
    return "".join(char for char in text if char.isprintable())[:MAX_CHARACTERS]
