"""Where agents are, by the cluster file, and whether a run file fits the nodes and the files that are there."""

import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainctl.protocol import runfile
from trainctl.protocol.errors import InvalidInputError

if TYPE_CHECKING:
    from trainctl.protocol.cluster import Cluster


class ClusterFile(NamedTuple):
    """A cluster file that was read."""

    path: Path
    cluster: "Cluster"

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names, in order."""
        return tuple(self.cluster.nodes)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where their agents listen, in order."""
        return tuple(entry.address for entry in self.cluster.nodes.values())


class Where(NamedTuple):
    """Agents that can be talked to: one address, or those of a cluster in their order."""

    addresses: tuple[str, ...]
    cluster: ClusterFile | None = None


def cluster_file(path: Path | None) -> ClusterFile | None:
    """The file at `path`; without one the default file, or None where there is none or it names no node.

    Raises InvalidInputError naming the file and the field.
    """
    from trainctl.protocol import cluster  # ZeroMQ: not for `--help`

    found = path or cluster.default_path()
    read = ClusterFile(found, cluster.read_default(path))
    if not read.nodes and path is not None:
        raise InvalidInputError(str(path), "it names no node: [nodes.NAME] with an address")
    return read if read.nodes else None


def run_file(
    path: Path, overrides: dict[str, str], *, local: bool, cluster: ClusterFile | None = None
) -> dict[str, Any]:
    """A run file resolved and checked, as plain values. Raises InvalidInputError naming the file and the field.

    With `cluster`, its nodes must be there, and the files of those that are this machine; without one, those of the
    node that is this machine if `local` says that the agent is on it.
    """
    config = runfile.read(path, overrides)
    if cluster is not None:
        _check_nodes(config, cluster, str(path))
        here = [node for node in config.nodes or cluster.nodes if is_local(cluster.cluster.nodes[node].address)]
    else:
        here = nodes_here(config) if local else []
    _check_paths(config, here, str(path))
    return runfile.to_dict(config)


def nodes_here(config: runfile.RunFile) -> list[str]:
    """Of the run file's nodes the one that is this machine, as far as can be told without a cluster file: the only one,
    or the one of this machine's name."""
    if len(config.nodes) < 2:
        return [*config.nodes] or [""]
    return [node for node in config.nodes if node == platform.node().partition(".")[0].lower()]


def _check_paths(config: runfile.RunFile, nodes: Sequence[str], where: str) -> None:
    """Model and data as each of these nodes has them, once where several have the same."""
    seen: set[tuple[str, str]] = set()
    for node in nodes:
        own = runfile.on_node(config, node)
        if (paths := (own.model.path, own.data.path)) not in seen:
            seen.add(paths)
            runfile.check_paths(own, where if own is config else f"{where}: nodes.{node}")


def _check_nodes(config: runfile.RunFile, cluster: ClusterFile, where: str) -> None:
    """Whether every node is of the cluster, and the batch has a sample for each."""
    for node in config.nodes:
        if node not in cluster.nodes:
            known = ", ".join(cluster.nodes)
            raise InvalidInputError(f"{where}: nodes.{node}", f"no such node in {cluster.path}; there are {known}")
    given = [table.share for table in config.nodes.values() if table.share is not None]
    free = len(config.nodes or cluster.nodes) - len(given)
    if sum(given) + free > config.batch.global_:
        raise InvalidInputError(
            f"{where}: batch.global",
            f"{config.batch.global_} is too few: shares sum to {sum(given)}, and {free} more take one or more",
        )


def is_local(address: str) -> bool:
    """Whether the agent at `address` sees this machine's files. Raises InvalidInputError for a bad address."""
    from trainctl.protocol import sockets  # ZeroMQ: not for `--help`

    parts = sockets.split(address)
    return parts.scheme == "ipc" or sockets.is_loopback(parts.hostname or "")
