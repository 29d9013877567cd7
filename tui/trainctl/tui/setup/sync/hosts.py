"""Which nodes of a run are other machines, and where ssh reaches them. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol.config import addresses
from trainctl.protocol.config.cluster_file import Cluster, NodeEntry
from trainctl.protocol.errors import InvalidInputError


class SyncHosts(NamedTuple):
    """The nodes of a run, from this machine."""

    here: str  # this machine's node; empty: none of the run's
    there: dict[str, str]  # of the other nodes, what ssh gets: user@host


def hosts(
    nodes: Sequence[str], cluster: Cluster, here: str, given: Mapping[str, str], own: Collection[str]
) -> SyncHosts:
    """`here`: this machine's name as a node. `given`: hosts from the command line by node. `own`: IP addresses of this
    machine. Raises InvalidInputError for a node that isn't in the cluster, or whose host isn't known.

    An address of this machine may be a port that is forwarded to another one, so a node with a host isn't this machine.
    """
    unknown = next((node for node in nodes if node not in cluster.nodes), None)
    if unknown is not None:
        raise InvalidInputError(f"nodes.{unknown}", f"no such node; the cluster's are {_listed(cluster.nodes)}")
    kept = {node: given.get(node) or cluster.nodes[node].ssh for node in nodes}
    is_here = {node: not kept[node] and (node == here or _is_own(cluster.nodes[node], own)) for node in nodes}
    first = here if is_here.get(here) else next((node for node in nodes if is_here[node]), "")
    return SyncHosts(first, {node: kept[node] or _host(cluster.nodes[node]) for node in nodes if not is_here[node]})


def _is_own(entry: NodeEntry, own: Collection[str]) -> bool:
    return addresses.is_near(entry.address) or _host(entry) in own


def _host(entry: NodeEntry) -> str:
    return addresses.host(entry.address)


def chosen(found: SyncHosts, only: Sequence[str]) -> dict[str, str]:
    """The other machines, or those of them that are asked for. Raises InvalidInputError for another one."""
    for node in only:
        if node == found.here:
            raise InvalidInputError("--node", f"{node} is this machine; give a node to copy to")
        if node not in found.there:
            raise InvalidInputError("--node", f"no node {node!r} on another machine; give {_listed(found.there)}")
    return {node: host for node, host in found.there.items() if not only or node in only}


def ssh_names(given: Sequence[str], nodes: Mapping[str, object]) -> dict[str, str]:
    """`NODE=USER@HOST` options by node. Raises InvalidInputError for another form, or a node that isn't known."""
    found = {}
    for text in given:
        node, equals, host = text.partition("=")
        if not (node and equals and host):
            raise InvalidInputError("--ssh", f"{text!r} must have the form NODE=USER@HOST")
        if node not in nodes:
            raise InvalidInputError("--ssh", f"no node {node!r}; the nodes are {_listed(nodes)}")
        found[node] = host
    return found


def _listed(nodes: Collection[str]) -> str:
    return ", ".join(nodes) or "none"
