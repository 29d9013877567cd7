"""Discovery of agents by multicast DNS (RFC 6763): they advertise their address, `trainctl cluster discover` reads it.

No one is bound to tell the truth there, so keys are never taken from it: the fingerprint only says which key to expect.
"""

import asyncio
import base64
import hashlib
import ipaddress
import socket
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.messages.base import PROTOCOL_VERSION

SERVICE = "_trainctl._tcp.local."
MAX_CHARACTERS = 128
LEAVE_SECONDS = 3.0
"""Seconds an ending agent waits for its last announcement to be sent."""


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


class Advertisement:
    """Advertisement of one agent, whose worker `serve` is. It talks to the network in threads only, and whatever fails
    in it stops nothing else."""

    def __init__(self, node: str, address: str, version: str, public: str = "") -> None:
        """`public`: the agent's public key, whose fingerprint is advertised; empty for one without keys."""
        self._node, self._address, self._told = node, address, properties(node, version, public)
        self._zeroconf: Any = None

    async def serve(self) -> None:
        """Advertise until cancelled; where that can't be, say why on standard error, and do nothing."""
        try:
            try:
                await asyncio.to_thread(self._begin)
            except Exception as error:  # noqa: BLE001  whatever the library does, the agent's work continues
                print(f"trainctl-agent: not advertised: {_why(error)}", file=sys.stderr, flush=True)
            await asyncio.Event().wait()
        finally:
            await self._end()

    def _begin(self) -> None:
        from zeroconf import IPVersion, ServiceInfo, Zeroconf  # an extra, and 0.1 s

        parts = addresses.split(self._address)
        if parts.scheme != "tcp":
            problem = "other machines can't reach a Unix socket; listen on TCP, with keys"
            raise InvalidInputError(self._address, problem)
        host = parts.hostname if ":" in parts.hostname else socket.gethostbyname(parts.hostname)
        everywhere = ipaddress.ip_address(host).is_unspecified
        own = _own_addresses() if everywhere else [host]
        label = self._node.replace(".", "-")  # a dot would end the name's first part
        self._zeroconf = Zeroconf(interfaces=own, ip_version=IPVersion.V6Only if ":" in host else IPVersion.V4Only)
        info = ServiceInfo(
            SERVICE,
            f"{label}.{SERVICE}",
            parts.port,
            properties=self._told,
            parsed_addresses=own,
            server=f"trainctl-{label}-{parts.port}.local.",
        )
        self._zeroconf.register_service(info, allow_name_change=True)

    async def _end(self) -> None:
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is None:
            return
        closing = asyncio.create_task(asyncio.to_thread(zeroconf.close))
        await asyncio.wait({closing}, timeout=LEAVE_SECONDS)


def _own_addresses() -> list[str]:
    import psutil

    entries = (entry for found in psutil.net_if_addrs().values() for entry in found)
    return [entry.address for entry in entries if entry.family == socket.AF_INET]


def _why(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; {installing('discovery')}"
    return f"{type(error).__name__}: {error}".rstrip(": ")
