"""The keys that a client shows to the agent at an address, and by which it knows that agent."""

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainctl.protocol.config import addresses, cluster_file
from trainctl.protocol.config.addresses import check_public
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.security.keys import KeyFolder, KeyPair, Role


@dataclass(frozen=True)
class Credentials:
    """One side's own pair and the key that it expects of the other side."""

    own: KeyPair
    server: str  # Z85
    role: Role = "operator"  # that the own pair is to have on the other side, for advice


class Keyring:
    """One of this machine's pairs and the agents' public keys, by address.

    An agent's key is the one that was learned for its address, or that the cluster file names with it, or the one that
    was given for an agent in general, or this machine's own agent's where the address is this machine's.
    """

    def __init__(
        self,
        folder: KeyFolder | None = None,
        nodes: Cluster | None = None,
        server_key: str | None = None,
        *,
        which: Literal["user", "agent"] = "user",
    ) -> None:
        """`nodes`: the default cluster file's unless given; `server_key`: $TRAINCTL_SERVER_KEY unless given; `which`:
        whose pair is shown. Raises InvalidInputError for a server key that is none."""
        self._folder, self._nodes, self._which = folder or KeyFolder(), nodes, which
        given = server_key or os.environ.get("TRAINCTL_SERVER_KEY") or None
        self._server_key = check_public(given) if given is not None else None
        self._learned: dict[str, str | None] = {}

    def learn(self, address: str, public: str | None) -> None:
        """Keep what an authenticated agent says about another one; the cluster file's word counts for more."""
        self._learned[address] = public

    def credentials(self, address: str) -> Credentials | None:
        """Return what to speak to the agent at `address` with, None for one on loopback that is not known to have a
        key. Raises InvalidInputError for one elsewhere whose key isn't known, for another user's socket, and for a lack
        of own keys."""
        host = addresses.host(address)
        _check_owner(address)
        is_near = addresses.is_near(address)
        server = self._named(address)
        if server is None and address in self._learned:
            server = self._learned[address]
        elif server is None:
            server = self._server_key or (None if is_near else self._own_agent(host))
        if server is not None:
            own = self._folder.user() if self._which == "user" else self._folder.agent()
            return Credentials(own, server)
        if is_near:
            return None
        raise InvalidInputError(
            address,
            "the agent's key is unknown; find it with trainctl keys list on the agent's machine, then "
            "put it into the cluster file ([nodes.NAME] key), or give it with --server-key or $TRAINCTL_SERVER_KEY",
        )

    def _named(self, address: str) -> str | None:
        if self._nodes is None:
            try:
                self._nodes = cluster_file.read_default()
            except InvalidInputError:
                self._nodes = Cluster()  # asking for the cluster reports it; an address alone needs no such file
        return next((entry.key for entry in self._nodes.nodes.values() if entry.address == address), None)

    def _own_agent(self, host: str) -> str | None:
        return self._folder.agent().public if is_own(host) and self._folder.has("agent") else None


def _check_owner(address: str) -> None:
    """Any user may have made the folder, under /tmp, in which this user's agent would listen."""
    path = addresses.socket_path(address)
    with contextlib.suppress(OSError):
        if path is not None and os.getuid() and Path(path).stat().st_uid not in (0, os.getuid()):
            raise InvalidInputError(address, "another user's agent listens there; connect to it over TCP, with a key")


def is_own(host: str) -> bool:
    """Return whether a host's name or IP address is this machine's: a socket can be bound to no other."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: Any) -> bool:
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


_installed: Keyring | None = None


def install(ring: Keyring | None) -> None:
    """The keyring of this program, for clients that are given none."""
    global _installed
    _installed = ring


def current() -> Keyring:
    """The program's keyring, or one of the default files."""
    return _installed or Keyring()
