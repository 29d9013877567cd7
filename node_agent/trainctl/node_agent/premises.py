"""What a run file wants of the cluster and of this machine: the nodes that take part, files, the network interface."""

import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import psutil

from trainctl.protocol import runfile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.runfile import RunFile


def with_nodes(config: RunFile, node: str, cluster: Sequence[str]) -> RunFile:
    """The run file with every node that is to take part: those it names, or else all of the cluster, or this one.

    Raises InvalidInputError for one that the cluster hasn't.
    """
    known = tuple(cluster) or (node,)
    unknown = sorted(set(config.nodes) - set(known))
    if unknown:
        there = f"there {'is' if len(known) == 1 else 'are'} {', '.join(known)}"
        raise InvalidInputError(f"config: nodes.{unknown[0]}", f"no such node in this cluster; {there}")
    tables = config.nodes or {name: runfile.NodeTable() for name in known}
    return msgspec.structs.replace(config, nodes=tables)


def check_on(config: RunFile, node: str, where: str = "config") -> None:
    """Whether a node has the model and the data that the run file wants. Raises InvalidInputError by the field."""
    here, interface = runfile.on_node(config, node), config.nodes[node].interface
    for field, path in (("model", here.model.path), ("data", here.data.path)):
        if not Path(path).is_absolute():
            problem = f"{path!r} must be absolute: agent and trainer run elsewhere"
            raise InvalidInputError(f"{where}: {field}.path", problem)
    runfile.check_paths(config, where, node)
    if (priority := config.nodes[node].priority) is not None:
        check_priority(priority, f"{where}: nodes.{node}.priority")
    if interface:
        _check_interface(interface, f"{where}: nodes.{node}.interface")


def check_priority(nice: int, field: str) -> None:
    """Whether this process may start others at that nice value, found out by a process that tries it; only one below
    its own can be refused. Raises InvalidInputError."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if nice >= own:
        return
    code = f"import os; os.setpriority(os.PRIO_PROCESS, 0, {nice})"
    if subprocess.run([sys.executable, "-ISc", code], capture_output=True, check=False).returncode:
        problem = f"{nice} is not permitted here; {own} and above are, or install the agent with --nice {nice}"
        raise InvalidInputError(field, problem)


def _check_interface(name: str, field: str) -> None:
    """Gradients travel unencrypted and to whoever connects, so for now they stay on loopback."""
    found = [entry.address for entry in psutil.net_if_addrs().get(name, ()) if entry.family == socket.AF_INET]
    if not found:
        there = ", ".join(sorted(psutil.net_if_addrs()))
        raise InvalidInputError(field, f"no interface {name!r} with an IPv4 address here; there are {there}")
    if not ipaddress.ip_address(found[0]).is_loopback:
        raise InvalidInputError(field, f"{name} ({found[0]}) is not loopback; sums aren't encrypted and stay on it")
