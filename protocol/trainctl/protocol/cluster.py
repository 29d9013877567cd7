"""cluster.toml: the nodes of a cluster and where their agents listen."""

import os
from pathlib import Path
from typing import Annotated

import msgspec
import platformdirs
from msgspec import Meta

from trainctl.protocol import sockets, tomlfile
from trainctl.protocol.alerting import AlertHooks, check_webhook
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.runfile import NAME_PATTERN


class NodeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node."""

    address: str  # tcp://host:port where its agent takes requests


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. An agent finds itself in it by its name; order is the order of ranks where a run file gives none."""

    nodes: dict[Annotated[str, Meta(pattern=NAME_PATTERN)], NodeEntry] = {}
    quorum: bool = False  # a lead makes no step while a majority of these nodes is out of its reach
    alerts: AlertHooks = AlertHooks()  # what this machine's agents call
    advertise: bool = False  # this machine's agents tell the local network where they are


def default_path() -> Path:
    """$TRAINCTL_CLUSTER, or cluster.toml in the platform's configuration folder."""
    chosen = os.environ.get("TRAINCTL_CLUSTER")
    return Path(chosen) if chosen else platformdirs.user_config_path("trainctl") / "cluster.toml"


def read(path: Path) -> Cluster:
    """Raises InvalidInputError naming the file and the field."""
    cluster = tomlfile.checked(tomlfile.read(path, "cluster file"), Cluster, str(path))
    seen: dict[str, str] = {}
    for name, entry in cluster.nodes.items():
        sockets.split(entry.address)
        if entry.address in seen:
            raise InvalidInputError(f"{path}: nodes.{name}.address", f"{entry.address} is {seen[entry.address]}'s too")
        seen[entry.address] = name
    check_webhook(cluster.alerts, f"{path}: alerts.webhook")
    return cluster


def read_default(path: Path | None = None) -> Cluster:
    """The file at `path`; without one the default file, or an empty cluster where there is none."""
    if path is not None:
        return read(path)
    found = default_path()
    return read(found) if found.is_file() else Cluster()
