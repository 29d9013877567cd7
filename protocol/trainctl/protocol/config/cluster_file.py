"""cluster.toml: the nodes of a cluster, where their agents listen, and by which keys they are known."""

import ipaddress
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.config import addresses, validation_errors
from trainctl.protocol.config.addresses import Key
from trainctl.protocol.config.alert_rules import AlertHooks, check_webhook
from trainctl.protocol.config.names import NAME_PATTERN, config_folder
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError

Micro = Annotated[int, Meta(ge=1, le=2**20)]
Step = Annotated[int, Meta(ge=1, le=2**40)]
Positive = Annotated[float, Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, Meta(ge=0, le=1e9)]
SPEEDS: Final = ("profile", "device", "samples_per_second", "passes")
"""Settings that say how fast a simulated node is; exactly one is given."""


class SpeedChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From a step on the node has another speed, as when a fan fails."""

    step: Step  # from which on it counts
    speed: Annotated[float, Meta(gt=0, le=100)]  # relative to the node's own


class SimulatedNode(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One machine with one rank. GB are 10^9 bytes."""

    profile: str = ""  # file of a calibration profile, relative to the cluster file
    device: str = ""  # a device by name, such as a100; its speed is an estimate
    samples_per_second: Positive | None = None  # training speed of one rank alone
    passes: Annotated[tuple[tuple[Micro, Positive], ...], Meta(max_length=64)] = ()  # [micro-batch, seconds of a pass]
    pass_seconds: NotNegative = 0.0  # with samples_per_second: what each pass takes whatever its size
    step_seconds: NotNegative | None = None  # what each step takes beside passes and sum; None: the profile's, or 0
    memory_gb: Positive | None = None  # memory that the trainer may take; None: the device's or profile's, or no limit
    model_gb: NotNegative | None = None  # memory that it holds at any micro-batch; None: profile or estimate
    sample_gb: NotNegative | None = None  # memory of each sample of a micro-batch; None: profile or estimate
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.02  # standard deviation of a step's seconds, relative
    drift: Annotated[float, Meta(ge=0, le=1)] = 0.0  # standard deviation by which its speed wanders in an hour
    speeds: Annotated[tuple[SpeedChange, ...], Meta(max_length=64)] = ()  # changes of its speed
    mtbf_hours: Positive | None = None  # mean time between failures of its trainer; None: it has none by chance
    fails_at: Annotated[tuple[Step, ...], Meta(max_length=64)] = ()  # steps in which its trainer dies
    load_seconds: NotNegative = 20.0  # until a started trainer has loaded
    link_gbit: Positive | None = None  # bandwidth in each direction, 10^9 bit/s; None: the profile's link, or 1
    latency_ms: NotNegative | None = None  # round trip to another node; None: the profile's, or 0.2
    disk_mb: Positive = 500.0  # 10^6 bytes per second that a checkpoint is written with
    backend: Literal["torch", "mlx"] = "torch"  # array library of its trainer


def check(node: SimulatedNode, where: str) -> None:
    """Raise InvalidInputError by the field."""
    given = [name for name in SPEEDS if getattr(node, name)]
    if len(given) != 1:
        problem = f"gives {' and '.join(given) or 'no speed'}; give exactly one of {', '.join(SPEEDS)}"
        raise InvalidInputError(where, problem)
    if node.pass_seconds and node.samples_per_second is None:
        raise InvalidInputError(f"{where}.pass_seconds", "applies only to samples_per_second: leave it out")
    sizes = [micro for micro, _ in node.passes]
    if sizes != sorted(set(sizes)):
        raise InvalidInputError(f"{where}.passes", "give each micro-batch once, in ascending order")


DEFAULT_CURRENCY = "USD"
Price = Annotated[float, Meta(ge=0, le=1e9)]
_CURRENCY = re.compile(r"[^\W\d_]{1,8}|[$€£¥₩₹]")
MAX_NODES = 1024


@dataclass(frozen=True)
class Prices:
    """Prices of nodes; a node that isn't in `per_hour` has none."""

    currency: str = DEFAULT_CURRENCY
    per_hour: Mapping[str, float] = field(default_factory=dict)  # by node


class NodeEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One node."""

    address: str  # where its agent takes requests: tcp://host:port, or ipc:///path
    metrics: str = ""  # host:port where its agent serves Prometheus; empty: nowhere
    key: Key | None = None  # its agent's public key
    ssh: str = ""  # user@host by which ssh reaches it; empty: the host of its address
    price_per_hour: Price | None = None  # what an hour of this machine costs; None: not said
    simulated: SimulatedNode | None = None  # the machine that `trainctl simulate` puts in its place


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file. An agent finds itself in it by its name; order is the order of ranks where a run file gives none."""

    nodes: dict[Annotated[str, Meta(pattern=NAME_PATTERN)], NodeEntry] = {}  # by name, in the order of ranks
    quorum: bool = False  # a lead makes no step while a majority of these nodes is out of its reach
    alerts: AlertHooks = AlertHooks()  # what this machine's agents call
    advertise: bool = False  # this machine's agents tell the local network where they are
    trusted_networks: tuple[str, ...] = ()  # in which gradients may travel, unencrypted: "10.0.0.0/24"
    currency: str = DEFAULT_CURRENCY  # of all prices: a word or a sign

    @property
    def prices(self) -> Prices:
        """Return the prices of the cluster's nodes."""
        given = {name: entry.price_per_hour for name, entry in self.nodes.items()}
        return Prices(self.currency, {name: price for name, price in given.items() if price is not None})

    def trusts(self, address: str) -> bool:
        """Return whether gradients may travel by the interface with this IP address: loopback, or in a trusted
        network."""
        found = ipaddress.ip_address(address)
        return found.is_loopback or any(found in ipaddress.ip_network(network) for network in self.trusted_networks)

    def nodes_of(self, public: str) -> frozenset[str]:
        """The nodes whose agents have this key."""
        return frozenset(name for name, entry in self.nodes.items() if entry.key == public)


class _Added(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file of cluster.d."""

    nodes: dict[Annotated[str, Meta(pattern=NAME_PATTERN)], NodeEntry] = {}


def default_path() -> Path:
    """$TRAINCTL_CLUSTER, or cluster.toml in the platform's configuration folder."""
    chosen = os.environ.get("TRAINCTL_CLUSTER")
    return Path(chosen) if chosen else config_folder() / "cluster.toml"


def read(path: Path, *, simulated: bool = False) -> Cluster:
    """The file, and the nodes of those in `cluster.d` beside it. A node that is only simulated, so without an address,
    is left out unless `simulated`. Raises InvalidInputError naming file and field."""
    raw = validation_errors.read_toml(path, "cluster file")
    if isinstance(nodes := raw.get("nodes"), dict) and len(nodes) > MAX_NODES:
        raise InvalidInputError(f"{path}: nodes", f"{len(nodes):,} nodes are too many; the maximum is {MAX_NODES:,}")
    raw = _placed(raw, simulated=simulated)
    cluster = _with_added(validation_errors.checked(raw, Cluster, str(path)), path)
    seen: dict[str, str] = {}
    for name, entry in cluster.nodes.items():
        if entry.simulated is not None:
            check(entry.simulated, f"{path}: nodes.{name}.simulated")
        addresses.split(entry.address)
        if entry.address in seen:
            raise InvalidInputError(
                f"{path}: nodes.{name}.address", f"{entry.address} is also {seen[entry.address]}'s address"
            )
        seen[entry.address] = name
    check_webhook(cluster.alerts, f"{path}: alerts.webhook")
    _check_networks(cluster.trusted_networks, f"{path}: trusted_networks")
    check_currency(cluster.currency, f"{path}: currency")
    return cluster


def _placed(raw: dict[str, Any], *, simulated: bool) -> dict[str, Any]:
    """The tables with an address, which nothing connects to, of each node that is only simulated; or without them."""
    nodes = raw.get("nodes")
    if not isinstance(nodes, dict):
        return raw
    found = {}
    for port, (name, table) in enumerate(nodes.items(), 1):
        only = isinstance(table, dict) and "simulated" in table and "address" not in table
        if simulated or not only:
            found[name] = {"address": f"tcp://127.0.0.1:{port}", **table} if only else table
    return raw | {"nodes": found}


def read_default(path: Path | None = None, *, simulated: bool = False) -> Cluster:
    """The file at `path`; without one the default file, or an empty cluster where there is none."""
    if path is not None:
        return read(path, simulated=simulated)
    found = default_path()
    if found.is_file():
        return read(found, simulated=simulated)
    return _with_added(Cluster(), found)


def check_growing(config: RunFile, cluster: Cluster, where: str) -> None:
    """Check whether all nodes of a run whose data grow are on one machine. Raises InvalidInputError by the field."""
    nodes = [*(config.nodes or cluster.nodes)]
    if not config.data.growing or len(nodes) < 2:
        return
    for node in nodes:
        entry = cluster.nodes.get(node)
        if entry is not None and not addresses.is_near(entry.address):
            problem = (
                f"a growing file is read on one machine, but {node} is at {entry.address}; use nodes of one machine"
            )
            raise InvalidInputError(f"{where}: data.growing", problem)


def check_hooks(cluster: Cluster, path: Path) -> None:
    """Refuse hooks that others could write, for an agent that would run their programs as its own user. Raises
    InvalidInputError."""
    if not (cluster.alerts.command or cluster.alerts.webhook):
        return
    file = path.resolve()
    for place in dict.fromkeys((file, path.parent, file.parent)):
        kept, what = place.stat(), "file" if place == file else "folder"
        if os.statvfs(place).f_flag & os.ST_RDONLY:
            continue  # no one writes there, whatever its mode: as the folder of a ConfigMap
        if kept.st_uid not in (0, os.getuid()):
            problem = f"another user owns the {what} {place}, and could have this agent run any program"
            raise InvalidInputError(f"{path}: alerts", f"{problem}; run: chown {os.getuid()} {place}")
        if kept.st_mode & 0o022 and not (what == "folder" and kept.st_mode & stat.S_ISVTX):
            problem = f"other users can write the {what} {place} (mode {kept.st_mode & 0o777:04o})"
            fix = f"and could have this agent run any program; run: chmod go-w {place}"
            raise InvalidInputError(f"{path}: alerts", f"{problem}, {fix}")


def added_directory(path: Path) -> Path:
    """Return where `trainctl cluster add` writes a file for each node it adds: a person's cluster file is never
    rewritten."""
    return path.parent / "cluster.d"


def _with_added(cluster: Cluster, path: Path) -> Cluster:
    nodes = dict(cluster.nodes)
    for file in sorted(added_directory(path).glob("*.toml")):
        for name, entry in validation_errors.checked(
            validation_errors.read_toml(file, "cluster file"), _Added, str(file)
        ).nodes.items():
            if name in nodes:
                raise InvalidInputError(
                    f"{file}: nodes.{name}", f"the node is also in {path} or a file next to it; keep only one"
                )
            nodes[name] = entry
    return msgspec.structs.replace(cluster, nodes=nodes)


def _check_networks(networks: tuple[str, ...], where: str) -> None:
    for network in networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            raise InvalidInputError(where, f"{error}; write a network as 10.0.0.0/24") from None


def check_currency(currency: str, where: str) -> None:
    """Raise InvalidInputError, about the setting named by `where`, unless it is one short word or a sign."""
    if not _CURRENCY.fullmatch(currency):
        raise InvalidInputError(
            where, f"{currency!r} is not a currency; write one word of at most 8 letters, such as EUR, or a sign"
        )
