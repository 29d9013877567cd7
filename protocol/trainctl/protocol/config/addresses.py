"""How one agent is named to another: by its address, `tcp://host:port` or `ipc://path`, and by its public key. Pure."""

import ipaddress
import re
from typing import Annotated, Any
from urllib.parse import urlsplit

from msgspec import Meta

from trainctl.protocol.errors import InvalidInputError

KEY_PATTERN = r"^[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}\Z"
Key = Annotated[str, Meta(pattern=KEY_PATTERN)]
"""A public key: 40 characters of Z85."""


def is_near(address: str) -> bool:
    """Whether an address is on loopback or a local socket file. Raises InvalidInputError for what is no address."""
    parts = split(address)
    return parts.scheme == "ipc" or is_loopback(parts.hostname or "")


def check_bind(address: str, *, keys: bool = False) -> None:
    """Refuse to listen without keys anywhere but on loopback or a local socket file, and on all interfaces at once.
    Raises InvalidInputError."""
    if not keys and not is_near(address):
        raise InvalidInputError(
            address, "an agent without keys can only listen on loopback; create a key and authorise a client: "
            "trainctl keys new; trainctl keys authorize NAME KEY --role operator",
        )  # fmt: skip
    if split(address).hostname in ("*", "0.0.0.0", "::"):  # noqa: S104
        raise InvalidInputError(address, "give the address that other machines connect to, such as tcp://10.0.0.5:7474")


def split(address: str) -> Any:
    """The parts of `tcp://host:port` or `ipc://path`. Raises InvalidInputError for anything else."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" and (parts.path or parts.netloc):
        return parts
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise InvalidInputError(
            address or "address", "an address must be tcp://host:port, such as tcp://127.0.0.1:7474"
        )
    return parts


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
