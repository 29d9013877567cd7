"""Demands of a run file on the cluster and this machine: the nodes that take part, files, the network interface."""

import dataclasses
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from trainctl.protocol.config import addresses, env_policy, run_file, run_tables
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.config.model_facts import is_hub_id
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError


@dataclasses.dataclass(frozen=True)
class Placement:
    """An agent's addresses and place."""

    address: str = "tcp://127.0.0.1:0"  # where it takes requests
    cluster: Cluster = dataclasses.field(default_factory=Cluster)


def with_nodes(config: RunFile, node: str, cluster: Sequence[str]) -> RunFile:
    """The run file with every node that is to take part: those it names, or else all of the cluster, or this one.

    Raises InvalidInputError for one that the cluster hasn't.
    """
    known = tuple(cluster) or (node,)
    unknown = sorted(set(config.nodes) - set(known))
    if unknown:
        there = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}"
        raise InvalidInputError(f"config: nodes.{unknown[0]}", f"no such node in this cluster; {there}")
    tables = config.nodes or {name: run_tables.NodeTable() for name in known}
    return msgspec.structs.replace(config, nodes=tables)


def check_on(config: RunFile, node: str, where: str = "config", placement: Placement = Placement()) -> None:
    """Check that a node has the model and the data that the run file wants, and may sum gradients by the interface that
    it names. Raises InvalidInputError by the field."""
    here = run_file.on_node(config, node)
    paths = {"model.path": here.model.path, "data.path": here.data.path, "data.held_out_path": here.data.held_out_path}
    for field, path in paths.items():
        if path and not Path(path).is_absolute() and not (field == "model.path" and is_hub_id(path)):
            problem = f"{path!r} must be an absolute path: the agent runs in a different folder"
            raise InvalidInputError(f"{where}: {field}", problem)
    run_file.check_paths(config, where, node)
    env_policy.check_allowed(config.nodes[node].env, os.environ, f"{where}: nodes.{node}.env")
    if (priority := config.nodes[node].priority) is not None:
        check_priority(priority, f"{where}: nodes.{node}.priority")
    check_network(config, node, where, placement)


def check_network(config: RunFile, node: str, where: str, placement: Placement) -> None:
    """Check that a node may sum gradients by the interface that it names. Raises InvalidInputError."""
    interface, field = config.nodes[node].interface, f"{where}: nodes.{node}.interface"
    if interface:
        _check_interface(node, interface, field, placement)
    elif len(config.nodes) > 1 and not addresses.is_near(placement.address):
        problem = f"{node} is at {placement.address}: name the interface that carries its gradients; {_interfaces()}"
        raise InvalidInputError(field, problem)


def check_priority(nice: int, field: str) -> None:
    """Check that this process may start others at that nice value, by a process that tries it; only one below its own
    can be refused. Raises InvalidInputError."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if nice >= own:
        return
    code = f"import os; os.setpriority(os.PRIO_PROCESS, 0, {nice})"
    if subprocess.run([sys.executable, "-ISc", code], capture_output=True, check=False).returncode:
        problem = f"{nice} is not permitted here; use {own} or more, or install the agent with --nice {nice}"
        raise InvalidInputError(field, problem)


def _interfaces() -> str:
    every = psutil.net_if_addrs().items()
    found = [f"{name} ({one.address})" for name, entries in every for one in entries if one.family == socket.AF_INET]
    return f"interfaces here: {', '.join(sorted(found)) or 'none'}"


def _check_interface(node: str, name: str, field: str, placement: Placement) -> None:
    """Gradients travel unencrypted, to any peer that connects, so they go by loopback or a network that is trusted."""
    entries = psutil.net_if_addrs().get(name, ())
    found = [(one.address, one.netmask) for one in entries if one.family == socket.AF_INET]
    if not found:
        there = ", ".join(sorted(psutil.net_if_addrs()))
        raise InvalidInputError(field, f"no interface {name!r} with an IPv4 address here; interfaces: {there}")
    for address, netmask in found:  # engines take one of them
        if not placement.cluster.trusts(address):
            network = ipaddress.ip_network(f"{address}/{netmask or 32}", strict=False)
            raise InvalidInputError(
                field,
                f"{name} ({address}) of {node} is outside the trusted networks, and gradients are sent "
                "unencrypted; if you trust that network, add to the node's cluster file: "
                f'trusted_networks = ["{network}"]',
            )
