"""Names of agents: their addresses, `tcp://host:port` or `ipc:///path`, their public keys, and where they listen for
Prometheus. Pure."""

import ipaddress
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple
from urllib.parse import urlsplit

from msgspec import Meta

from trainctl.protocol.errors import InvalidInputError

KEY_PATTERN = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z"
Key = Annotated[str, Meta(pattern=KEY_PATTERN)]
"""A public key: 40 characters of Z85."""


def is_near(address: str) -> bool:
    """Return whether an address is on loopback or a local socket file. Raises InvalidInputError for what is no
    address."""
    parts = split(address)
    return parts.scheme == "ipc" or is_loopback(parts.hostname or "")


def check_bind(address: str, *, keys: bool, no_keys: bool = False) -> None:
    """Refuse TCP without keys, which only `no_keys` allows, and only on loopback; and all interfaces at once. Raises
    InvalidInputError."""
    parts = split(address)
    if parts.scheme == "ipc" or keys or (no_keys and is_near(address)):
        if parts.hostname in ("*", "0.0.0.0", "::"):  # noqa: S104
            problem = "give the address that other machines connect to, such as tcp://10.0.0.5:7474"
            raise InvalidInputError(address, problem)
        return
    remedy = "create them with trainctl keys new and authorise clients with trainctl keys authorize NAME KEY"
    if is_near(address):
        remedy += (
            "; or listen on a Unix socket, ipc:///PATH, as agents do without an address, which needs none; or admit "
            "all users of this machine with --no-keys"
        )
    raise InvalidInputError(address, f"TCP needs keys: {remedy}")


MAX_PATH_BYTES = (107 if sys.platform == "linux" else 103) - len(".live")
"""Longest path of a Unix socket (sun_path in unix(7) and unix(4)) beside which an agent can publish."""


def split(address: str) -> Any:
    """Return the parts of `tcp://host:port` or `ipc:///path`. Raises InvalidInputError for anything else, and for a
    path that is too long for a Unix socket."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" and not parts.netloc and len(parts.path) > 1:
        if (size := len(os.fsencode(parts.path))) > MAX_PATH_BYTES:
            problem = f"its path has {size} bytes, and a Unix socket's at most {MAX_PATH_BYTES}: choose a shorter one"
            raise InvalidInputError(address, problem)
        return parts  # others have no file, so every user could connect: ipc://@name, ipc://*
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise InvalidInputError(
            address or "address", "an address must be tcp://host:port, such as tcp://127.0.0.1:7474, or ipc:///path"
        )
    return parts


def host(address: str) -> str:
    """Return the host; 127.0.0.1 for a Unix socket. Raises InvalidInputError for what is no address."""
    return split(address).hostname or "127.0.0.1"


def socket_path(address: str) -> str | None:
    """Return the file of a Unix socket, or None for a TCP address."""
    return address.removeprefix("ipc://") if address.startswith("ipc:///") else None


def live_beside(address: str) -> str:
    """Return where an agent publishes that takes requests at `address`, unless it says otherwise: at the next port, or
    at the file with `.live` after its name."""
    parts = split(address)
    if parts.scheme != "tcp":
        return f"{address}.live"
    name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"tcp://{name}:{parts.port + 1 if parts.port else 0}"


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_public(public: str) -> str:
    """The key. Raises InvalidInputError if it is none."""
    if not re.fullmatch(KEY_PATTERN, public):
        raise InvalidInputError("KEY", f"{public!r} is not a key: give the 40 characters from trainctl keys list")
    return public


# ---------------------------------------------------------------- the Prometheus endpoint's

EXAMPLE_LISTEN = "127.0.0.1:9474"


class ListenAddress(NamedTuple):
    """An address to listen at; port 0 is a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen(text: str, where: str) -> ListenAddress:
    """`IP-ADDRESS:PORT` or `localhost:PORT`, IPv6 in brackets. Raises InvalidInputError naming `where`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    host = "127.0.0.1" if host == "localhost" else host
    if not is_ip(host) or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise InvalidInputError(where, f"{text!r} is not IP-ADDRESS:PORT, such as {EXAMPLE_LISTEN}")
    return ListenAddress(host, int(port))


def check_listen(listen: ListenAddress, where: str, trusted: Sequence[str], *, anyone: bool = False) -> None:
    """Refuse an address that untrusted machines can reach: the endpoint asks no one for a key. `anyone`: an option
    of the agent says that this is meant. Raises InvalidInputError."""
    if anyone or is_loopback(listen.host):
        return
    address = ipaddress.ip_address(listen.host)
    if not address.is_unspecified and any(
        address in ipaddress.ip_network(network, strict=False) for network in trusted
    ):
        return
    raise InvalidInputError(
        where,
        f"anyone who can reach {listen} could read the metrics without a key: use {EXAMPLE_LISTEN}, an address in the "
        f"cluster file's trusted_networks, or --metrics-for-anyone",
    )


def is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
