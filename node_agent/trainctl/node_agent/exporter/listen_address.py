"""Where the Prometheus endpoint may listen: on loopback, or on an address of a network that the cluster file trusts."""

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple

from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError

EXAMPLE = "127.0.0.1:9474"


class ListenAddress(NamedTuple):
    """An address to listen at; port 0 is a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse(text: str, where: str) -> ListenAddress:
    """`IP-ADDRESS:PORT` or `localhost:PORT`, IPv6 in brackets. Raises InvalidInputError naming `where`."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    host = "127.0.0.1" if host == "localhost" else host
    if not is_address(host) or not (port.isascii() and port.isdigit() and int(port) < 2**16):
        raise InvalidInputError(where, f"{text!r} is not IP-ADDRESS:PORT, such as {EXAMPLE}")
    return ListenAddress(host, int(port))


def check(listen: ListenAddress, where: str, trusted: Sequence[str], *, anyone: bool = False) -> None:
    """Refuse an address that untrusted machines can reach: the endpoint asks no one for a key. `anyone`: an option
    of the agent says that this is meant. Raises InvalidInputError."""
    if anyone or addresses.is_loopback(listen.host):
        return
    address = ipaddress.ip_address(listen.host)
    if not address.is_unspecified and any(_is_in(address, network) for network in trusted):
        return
    raise InvalidInputError(
        where,
        f"anyone who can reach {listen} could read the metrics without a key: use {EXAMPLE}, an address in the "
        f"cluster file's trusted_networks, or --metrics-for-anyone",
    )


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_in(address: ipaddress.IPv4Address | ipaddress.IPv6Address, network: str) -> bool:
    return address in ipaddress.ip_network(network, strict=False)
