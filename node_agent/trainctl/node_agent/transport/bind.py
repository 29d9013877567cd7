"""Resources that an agent takes when it starts: its node's folder, its addresses, and the pipe to who started it."""

import asyncio
import contextlib
import fcntl
import os
import resource
import socket
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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
LOST_SECONDS = 5.0
"""Seconds in which an agent whose folder was taken still raises an alert about that, before it ends."""


class TakenError(InvalidInputError):
    """Another agent has the node's folder."""


class FolderLock:
    """The node's folder is one agent's at a time, by a lock on a file in it."""

    def __init__(self, directory: Path) -> None:
        """Raises InvalidInputError."""
        self._directory, self._path = directory, directory / "agent.lock"
        self._handle = self._lock()
        self._lost_monotonic: float | None = None  # since when another agent has it
        self.problem: str | None = None
        """A line on why the lock isn't held any more."""

    def _lock(self) -> IO[str]:
        try:
            make_folder(self._directory)
            handle = self._path.open("a+")  # not emptied: another agent may be in it
        except OSError as error:
            problem = f"the agent cannot use this folder: {error.strerror}"
            raise InvalidInputError(str(self._directory), problem) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            with handle:
                handle.seek(0)
                owner = f" ({words})" if (words := handle.read(200).strip()) else ""
            problem = f"another agent of this node is running{owner}: stop it, or give this one another --state"
            raise TakenError(str(self._directory), problem) from None
        handle.truncate(0)
        handle.write(f"pid {os.getpid()} on {socket.gethostname()}\n")
        handle.flush()
        return handle

    def look(self) -> None:
        """Lock the file again where it is gone or replaced: a second agent would not notice this one. Raises TakenError
        once another agent has had the folder for LOST_SECONDS: two would lead one run and end each other's trainers."""
        if self._is_held() or not self._directory.exists():
            self.problem = self._lost_monotonic = None
            return
        try:
            self._handle, left = self._lock(), self._handle
            left.close()
            self.problem = self._lost_monotonic = None
        except TakenError as error:
            self.problem, now = f"{error}; this one ends soon", time.monotonic()
            self._lost_monotonic = self._lost_monotonic or now
            if now >= self._lost_monotonic + LOST_SECONDS:
                raise
        except InvalidInputError as error:
            self.problem = str(error)

    @property
    def is_taken(self) -> bool:
        """Return whether another agent has the folder."""
        return self._lost_monotonic is not None

    def _is_held(self) -> bool:
        with contextlib.suppress(OSError):
            return os.path.samestat(self._path.stat(), os.fstat(self._handle.fileno()))
        return False

    def close(self) -> None:
        self._handle.close()


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
        bound_socket.get(zmq.EVENTS)  # to bind reads the wakeups of what has come: an asyncio socket looks again now
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


@dataclass(frozen=True)
class _SocketFile:
    path: Path
    bound_socket: Callable[[], Any]
    is_own: bool  # in the node's runtime folder, not where somebody asked for it


class SocketFiles:
    """The Unix sockets of an agent, bound again where a file has gone, as those in /run/user do at a logout and old
    ones in /tmp at a clean-up.

    A socket is bound again without being unbound: ZeroMQ would end the connections that came over it. As long as the
    node's own folder can't be made again, its sockets are also bound in the one that `folder` returns instead.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._files: dict[str, _SocketFile] = {}

    def keep(self, address: str, bound_socket: Callable[[], Any]) -> None:
        """Look after the file of an address, which `bound_socket` finds the socket for; None: there is none now."""
        path = addresses.socket_path(address)
        if path is not None:
            is_own = False
            with contextlib.suppress(InvalidInputError, OSError):
                is_own = Path(path).parent.name == self._folder().name
            self._files[address] = _SocketFile(Path(path), bound_socket, is_own)

    def add(self, address: str, bound_socket: Callable[[], Any]) -> None:
        """Look after the file of another address of a socket that is bound already; a killed agent may have left it."""
        if address not in self._files:
            _is_bound(bound_socket(), address)
            self.keep(address, bound_socket)

    def look(self) -> None:
        """Bind those that are gone; call it every second or so."""
        for address, file in [*self._files.items()]:
            bound_socket = None if file.path.exists() else file.bound_socket()
            if bound_socket is None or _is_bound(bound_socket, address) or not file.is_own:
                continue
            with contextlib.suppress(InvalidInputError, OSError):
                self.add(f"ipc://{self._folder() / file.path.name}", file.bound_socket)

    def current(self, address: str) -> str:
        """Return where a socket can be reached now: at its address, or in the folder that stands in for that one's."""
        file = self._files.get(address)
        if file is None or file.path.exists():
            return address
        beside = (at for at, other in self._files.items() if other.path.name == file.path.name and other.path.exists())
        return next(beside, address)

    @property
    def gone(self) -> list[str]:
        """The files that are gone and can't be made again yet."""
        files = self._files.values()
        return [str(file.path) for file in files if not file.path.exists() and file.bound_socket() is not None]

    def remove(self) -> None:
        """Leave no file behind, once the sockets are closed, as ZeroMQ does, and no empty folder of the node's own."""
        for address, file in self._files.items():
            with contextlib.suppress(InvalidInputError, OSError):
                if not file.is_own:  # nobody else binds there: this agent has the node's lock
                    _check_free(file.path, address)
                file.path.unlink()
            if file.is_own:
                with contextlib.suppress(OSError):  # trainers of a run find the next agent by a file in it
                    file.path.parent.rmdir()


def _is_bound(bound_socket: Any, address: str) -> bool:
    try:
        bind(bound_socket, address)
    except (InvalidInputError, OSError):
        return False
    return True


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


def check_parent() -> None:
    """Check that standard input can be watched for its end. Raises InvalidInputError if it is no pipe."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        mode = 0
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        raise InvalidInputError("--leash", "standard input is not a pipe")


async def parent_gone() -> None:
    """Return at the end of standard input, when no program holds it; what comes before it is thrown away."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer
    )
    try:
        while await reader.read(4096):
            pass
    finally:
        transport.close()
