"""What an agent takes for itself when it starts: its node's folder and its addresses."""

import contextlib
import fcntl
import os
import resource
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from trainctl.protocol.config import addresses
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import make_folder
from trainctl.protocol.security.keys import KeyFolder
from trainctl.protocol.wire import sockets

IN_USE = "the address is in use, perhaps by another agent"
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
    """Bind and give the address with its real port; a Unix socket's file is open to this user alone. Raises
    InvalidInputError if the address can't be had."""
    path = addresses.socket_path(address)
    if path is not None:
        _check_free(Path(path), address)
    mask = os.umask(0o177) if path is not None else None
    try:
        sockets.bind(bound_socket, address)
    except zmq.ZMQError as error:
        why = IN_USE if error.errno == zmq.EADDRINUSE else error.strerror
        raise InvalidInputError(address, f"cannot listen: {why}") from None
    finally:
        if mask is not None:
            os.umask(mask)
    bound: bytes = bound_socket.getsockopt(zmq.LAST_ENDPOINT)
    return bound.rstrip(b"\0").decode()


def _check_free(path: Path, address: str) -> None:
    """ZeroMQ removes whatever has the name, even a socket that another agent listens on."""
    with contextlib.suppress(FileNotFoundError):
        with contextlib.suppress(OSError):
            path.parent.mkdir(mode=0o700)
        if path.parent.stat().st_uid not in (0, os.getuid()):
            raise InvalidInputError(address, f"cannot listen: {path.parent} is another user's folder; use one of yours")
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidInputError(address, f"cannot listen: {path} is a file; give the name of a new one")
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(ConnectionRefusedError):
            probe.connect(str(path))
            raise InvalidInputError(address, f"cannot listen: {IN_USE}")


class SocketFiles:
    """The Unix sockets of an agent, bound again where a file has gone, as those in /run/user do at a logout and old
    ones in /tmp at a clean-up."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[Path, Callable[[], Any]]] = {}
        self._unbound: set[str] = set()

    def keep(self, address: str, bound_socket: Callable[[], Any]) -> None:
        """Look after the file of an address, which `bound_socket` finds the socket for; None: there is none now."""
        path = addresses.socket_path(address)
        if path is not None:
            self._files[address] = Path(path), bound_socket

    def look(self) -> None:
        """Bind those that are gone; call it every second or so."""
        for address, (path, find) in self._files.items():
            if path.exists() or (bound_socket := find()) is None:
                continue
            if address not in self._unbound:  # ZeroMQ may remove the file with the old listener, later: bind next time
                self._unbound.add(address)
                with contextlib.suppress(zmq.ZMQError):
                    bound_socket.unbind(address)
                continue
            with contextlib.suppress(InvalidInputError, OSError):
                bind(bound_socket, address)
                self._unbound.discard(address)

    def remove(self) -> None:
        """Leave no file behind, once the sockets are closed, as ZeroMQ does."""
        for address, (path, _) in self._files.items():
            with contextlib.suppress(InvalidInputError, OSError):
                if path.exists():
                    _check_free(path, address)
                    path.unlink()


def needs_keys(node: str, listen: str, live: str, cluster: Cluster, folder: KeyFolder, *, no_keys: bool) -> bool:
    """Return whether an agent that listens at these addresses uses keys: over TCP unless `no_keys`, and where the
    cluster file names a key for it. Raises InvalidInputError for an address that can't be listened on so."""
    entry = cluster.nodes.get(node)
    named = entry is not None and entry.key is not None
    if named and no_keys:
        raise InvalidInputError("--no-keys", f"the cluster file has a key for {node}; leave out one of the two")
    has_tcp = any(addresses.socket_path(address) is None for address in (listen, live))
    needed = named or (has_tcp and not no_keys)
    for address in (listen, live):
        addresses.check_bind(address, keys=needed and folder.has("agent"), no_keys=no_keys)
    return needed


def numeric(address: str) -> str:
    """An address to bind, the name of its host looked up; unchanged for one that isn't known."""
    parts = addresses.split(address)
    if parts.scheme == "ipc" or parts.hostname == "localhost" or ":" in parts.hostname:
        return address
    with contextlib.suppress(OSError):
        host = socket.getaddrinfo(parts.hostname, None, socket.AF_INET)[0][4][0]
        return f"tcp://{host}:{parts.port}"
    return address
