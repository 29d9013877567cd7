"""Listens for agents that advertise themselves, and compares what they say with the cluster file."""

import threading
from typing import Any

from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.machine import discovery
from trainctl.protocol.machine.discovery import Advert

RESOLVE_MILLISECONDS = 1500


def listen(seconds: float) -> tuple[Advert, ...]:
    """Return all agents that are heard within so long, by name. Raises InvalidInputError where zeroconf isn't
    installed."""
    try:
        from zeroconf import InterfaceChoice, IPVersion, ServiceBrowser, Zeroconf
    except ModuleNotFoundError:
        raise InvalidInputError("discover", f"zeroconf is not installed; {installing('discovery')}") from None
    listener, over = _Listener(), threading.Event()
    zeroconf = Zeroconf(interfaces=InterfaceChoice.All, ip_version=IPVersion.V4Only)
    try:
        browser = ServiceBrowser(zeroconf, discovery.SERVICE, listener)  # type: ignore[arg-type]
        over.wait(seconds)
        browser.cancel()
        infos = [zeroconf.get_service_info(discovery.SERVICE, name, RESOLVE_MILLISECONDS) for name in listener.names]
    finally:
        zeroconf.close()
    heard = [(host, info) for info in infos if info is not None for host in info.parsed_addresses()]
    return tuple(sorted({discovery.advert(host, info.port or 0, info.properties) for host, info in heard}))


def standing(advert: Advert, cluster: Cluster | None) -> str:
    """Return what the cluster file has of it."""
    entry = cluster.nodes.get(advert.node) if cluster is not None else None
    if entry is None:
        return "not in the cluster file"
    if entry.key and discovery.fingerprint(entry.key) != advert.fingerprint:
        return "KEY DIFFERS from the cluster file"
    return "in the cluster file" if entry.address == advert.address else f"in the cluster file at {entry.address}"


class _Listener:
    """The names heard, in the form that the library calls its listeners."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def add_service(self, _zeroconf: Any, _kind: str, name: str) -> None:
        self.names[name] = None

    update_service = add_service

    def remove_service(self, _zeroconf: Any, _kind: str, name: str) -> None:
        self.names.pop(name, None)
