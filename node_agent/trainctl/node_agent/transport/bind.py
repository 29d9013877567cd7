"""What an agent takes for itself when it starts: its node's folder and its addresses."""

import contextlib
import fcntl
import resource
import socket
from pathlib import Path
from typing import Any

import zmq

from trainctl.protocol.config import addresses
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder
from trainctl.protocol.security.keys import KeyFolder

MOST_OPEN_FILES = 65536
OPEN_MAX = 10_240
"""Open files that macOS allows where it refuses more, whatever its hard limit says."""


def lock(directory: Path) -> Any:
    """The node's folder is one agent's at a time. Raises InvalidInputError."""
    try:
        make_folder(directory)
        handle = (directory / "agent.lock").open("w")
    except OSError as error:
        raise InvalidInputError(str(directory), f"the agent cannot use this folder: {error.strerror}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.close()
        raise InvalidInputError(str(directory), "another agent of this node is running") from None
    return handle


def allow_open_files() -> None:
    """Have room for as many connections as the system lets this process have, up to MOST_OPEN_FILES."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in (MOST_OPEN_FILES, OPEN_MAX):
        wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return


def bind(bound_socket: Any, address: str) -> str:
    """Bind and give the address with its real port. Raises InvalidInputError if it is taken."""
    try:
        bound_socket.bind(address)
    except zmq.ZMQError as error:
        why = "the address is in use, perhaps by another agent" if error.errno == zmq.EADDRINUSE else error.strerror
        raise InvalidInputError(address, f"cannot listen: {why}") from None
    bound: bytes = bound_socket.getsockopt(zmq.LAST_ENDPOINT)
    return bound.rstrip(b"\0").decode()


def needs_keys(node: str, listen: str, live: str, cluster: Cluster, folder: KeyFolder, *, required: bool) -> bool:
    """Whether an agent that listens at these addresses uses keys: off loopback, where the cluster file names a key for
    it, or if that is `required`. Raises InvalidInputError for an address that can't be listened on so."""
    entry = cluster.nodes.get(node)
    named = entry is not None and entry.key is not None
    needed = required or named or not (addresses.is_near(listen) and addresses.is_near(live))
    for address in (listen, live):
        addresses.check_bind(address, keys=needed and folder.has("agent"))
    return needed


def numeric(address: str) -> str:
    """An address to bind, the name of its host looked up; unchanged for one that isn't known."""
    parts = addresses.split(address)
    if parts.scheme == "ipc" or parts.hostname == "localhost":
        return address
    with contextlib.suppress(OSError):
        host = socket.getaddrinfo(parts.hostname, None, socket.AF_INET)[0][4][0]
        return f"tcp://{host}:{parts.port}"
    return address


def port_after(listen: str) -> str:
    """Where an agent that takes requests at `listen` publishes if nothing else is said."""
    parts = addresses.split(listen)
    if parts.scheme != "tcp":
        return f"{listen}.live"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"tcp://{host}:{parts.port + 1 if parts.port else 0}"
