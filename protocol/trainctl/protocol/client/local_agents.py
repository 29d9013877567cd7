"""The agents that this user runs on this machine: each keeps a small locked file, by which programs find it without
being given an address."""

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from trainctl.protocol.config.names import agent_address, node_directory, node_name, state_root
from trainctl.protocol.errors import InvalidInputError


class LocalAgent(msgspec.Struct, frozen=True):
    """An agent that runs. `cluster` has the addresses of all nodes of its cluster file, in order."""

    node: str
    address: str
    pid: int
    host: str  # a home folder may be that of several machines
    cluster: tuple[str, ...] = ()
    key: str = ""  # its public key; empty: it uses none
    state: str = ""  # folder of the nodes' folders; empty: an earlier version's agent doesn't say
    socket: str = ""  # path of its socket for training loops of this machine; empty: it has none


class Registration:
    """The file of an agent that runs. The lock on it tells that the agent lives: a file that a killed one left is not
    taken for it."""

    def __init__(self, agent: LocalAgent) -> None:
        self._agent, self._file = agent, contextlib.ExitStack()
        self._path = _folder() / f"{agent.host}-{agent.pid}.json"
        self._write()

    def look(self, address: str, guest_socket: str) -> None:
        """Write it again if it is gone, or if the agent can be reached elsewhere now."""
        agent = msgspec.structs.replace(self._agent, address=address, socket=guest_socket)
        if agent != self._agent or not self._path.exists():
            self._agent = agent
            self._write()

    def _write(self) -> None:
        new, left = self._path.with_name(f".{self._path.stem}"), self._file
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _drop_left(self._path.parent, self._agent.host)
            file = held.enter_context(new.open("wb"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(msgspec.json.encode(self._agent))
            file.flush()
            new.rename(self._path)
            self._file = held.pop_all()
            left.close()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        self._file.close()


@contextlib.contextmanager
def registered(
    node: str, address: str, cluster: Sequence[str] = (), key: str = "", state: str = "", guest_socket: str = ""
) -> Iterator[Registration]:
    """Let an agent be found as long as this lasts; where no file can be kept, only by its address."""
    agent = LocalAgent(node, address, os.getpid(), socket.gethostname(), tuple(cluster), key, state, guest_socket)
    registration = Registration(agent)
    try:
        yield registration
    finally:
        registration.end()


def running() -> list[list[LocalAgent]]:
    """The agents that live, those of one cluster together, in the order of its file."""
    clusters: dict[tuple[str, ...], list[LocalAgent]] = {}
    for path in sorted(_folder().glob("*.json")):
        agent = _read(path)
        if agent is not None and agent.host == socket.gethostname():
            clusters.setdefault(agent.cluster or (agent.address,), []).append(agent)
    for cluster, agents in clusters.items():
        agents.sort(key=lambda agent: cluster.index(agent.address) if agent.address in cluster else len(cluster))
    return [*clusters.values()]


def only() -> list[LocalAgent]:
    """The only agent, or agents of one cluster, that run here; none where there is none. Raises InvalidInputError that
    lists them where there are several."""
    clusters = running()
    if len(clusters) > 1:
        named = "; ".join(f"{', '.join(one.node for one in agents)} at {agents[0].address}" for agents in clusters)
        raise InvalidInputError(
            "--connect", f"several agents run on this machine; choose one with --connect or $TRAINCTL_CONNECT: {named}"
        )
    return clusters[0] if clusters else []


def default_address() -> str:
    """Return where the agent of this machine's usual node listens if it is given no address."""
    return agent_address(node_directory(node_name()))


def _folder() -> Path:
    """Not a node's folder: no node's name begins with a dot."""
    return state_root() / ".agents"


def _read(path: Path) -> LocalAgent | None:
    """Return the content of a file whose agent lives, else None."""
    with contextlib.suppress(OSError, msgspec.DecodeError), path.open("rb") as file:
        if not _is_free(file):
            return msgspec.json.decode(file.read(), type=LocalAgent)
    return None


def _is_free(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _drop_left(folder: Path, host: str) -> None:
    """Files of agents of this machine that were killed."""
    for path in folder.glob(f"{host}-*.json"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            if _is_free(file):
                path.unlink()
