"""Addresses of agents: those of the cluster file, or the ones on this machine."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainctl.protocol.errors import InvalidInputError

if TYPE_CHECKING:
    from trainctl.protocol.config.cluster_file import Cluster


@dataclass(frozen=True)
class ClusterFile:
    """A cluster file that was read."""

    path: Path
    cluster: "Cluster"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes' names, in order."""
        return tuple(self.cluster.nodes)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return where their agents listen, in order."""
        return tuple(entry.address for entry in self.cluster.nodes.values())

    def address_of(self, node: str) -> str:
        """Return where the agent of a node listens. Raises InvalidInputError for a node that isn't in the file."""
        if node not in self.cluster.nodes:
            raise InvalidInputError("NODE", f"no node {node!r} in {self.path}; the nodes are {', '.join(self.nodes)}")
        return self.cluster.nodes[node].address


@dataclass(frozen=True)
class Where:
    """Agents that can be talked to: one address, or those of a cluster in their order."""

    addresses: tuple[str, ...]
    cluster: ClusterFile | None = None


def on_this_machine() -> Where:
    """Return the only agent, or agents of one cluster, that this user runs here; the default address where there is
    none.

    Raises InvalidInputError that lists them where there are several.
    """
    from trainctl.protocol.client import local_agents  # ZeroMQ: not for `--help`

    return Where(tuple(agent.address for agent in local_agents.only()) or (local_agents.default_address(),))


def cluster_file(path: Path | None, *, simulated: bool = False) -> ClusterFile | None:
    """Return the file at `path`; without one the default file, or None where there is none or it names no node.

    Raises InvalidInputError naming the file and the field.
    """
    from trainctl.protocol.config import cluster_file as cluster  # ZeroMQ: not for `--help`

    found = path or cluster.default_path()
    read = ClusterFile(found, cluster.read_default(path, simulated=simulated))
    if not read.nodes and path is not None:
        raise InvalidInputError(str(path), "no nodes: add [nodes.NAME] with an address")
    return read if read.nodes else None


def use_keys(file: ClusterFile | None, server_key: str | None) -> None:
    """Have all clients know agents by the keys of this cluster file (None: the default one) and by the one given."""
    from trainctl.protocol.security import keyring  # ZeroMQ: not for `--help`

    keyring.install(keyring.Keyring(nodes=file.cluster if file is not None else None, server_key=server_key))


def forget_keys() -> None:
    """Have clients know agents by the default files again."""
    if "trainctl.protocol.security.keyring" in sys.modules:
        from trainctl.protocol.security import keyring

        keyring.install(None)


def is_local(address: str) -> bool:
    """Return whether the agent at `address` sees this machine's files. Raises InvalidInputError for a bad address."""
    from trainctl.protocol.config import addresses

    return addresses.is_near(address)
