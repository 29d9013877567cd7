"""The agent's word of itself by multicast DNS, if it is asked for; whatever fails in it stops nothing else."""

import asyncio
import ipaddress
import socket
import sys
from typing import Any

from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.machine import discovery

LEAVE_SECONDS = 3.0
"""Seconds an ending agent waits for its last announcement to be sent."""


class Advertisement:
    """One agent's; `serve` is a worker of the agent, and talks to the network in threads only."""

    def __init__(self, node: str, address: str, version: str, public: str = "") -> None:
        """`public`: the agent's public key, whose fingerprint is advertised; empty for one without keys."""
        self._node, self._address, self._told = node, address, discovery.properties(node, version, public)
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
            discovery.SERVICE,
            f"{label}.{discovery.SERVICE}",
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
