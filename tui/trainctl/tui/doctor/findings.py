"""The doctor's facts and findings, all immutable: what each agent reported, how it was reached, the run file asked
about."""

from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network
from typing import Literal

from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import Digests, Disk, Facts

Level = Literal["ok", "warn", "fail"]
Subject = Literal[
    "reach",
    "version",
    "clock",
    "keys",
    "port",
    "disk",
    "memory",
    "files",
    "interface",
    "environment",
    "compiler",
    "power",
    "socket",
    "alerts",
    "model",
    "data",
    "held-out data",
]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's output."""

    level: Level
    node: str  # empty: of the cluster as a whole
    subject: Subject
    text: str  # what it is, and what that means
    do: str = ""  # what would fix it


@dataclass(frozen=True)
class Trouble:
    """The reason for which something wasn't reached."""

    kind: Literal["refused", "no-route", "timeout", "silent", "not-authorised", "version", "protocol", "other"]
    text: str


@dataclass(frozen=True)
class Look:
    """One node as it was seen from here."""

    name: str
    address: str
    facts: Facts | None = None
    trouble: Trouble | None = None  # why there are no facts
    live_trouble: Trouble | None = None  # of the port that it publishes on
    live_address: str = ""
    round_trip_seconds: float = 0.0
    clock_offset_seconds: float = 0.0  # its clock less this machine's; right to half the round trip
    is_here: bool = False  # it is this machine
    hook_problem: str = ""  # what is wrong with each of its alert hooks


Asset = Literal["model", "data", "held-out data"]


@dataclass(frozen=True)
class Hashed:
    """A model or data as one node has it."""

    node: str
    what: Asset
    path: str
    digests: Digests


@dataclass(frozen=True)
class Measured:
    """The speed of the disk that holds one node's token caches."""

    node: str
    cache_path: str  # from the run file; empty: the agent's own folder
    disk: Disk


@dataclass(frozen=True)
class ClusterFacts:
    """All there is to judge."""

    here: Facts
    looks: tuple[Look, ...]
    trusted_networks: tuple[IPv4Network | IPv6Network, ...] = ()
    run: RunFile | None = None
    hashed: tuple[Hashed, ...] = ()
    measured: tuple[Measured, ...] = ()

    @property
    def met(self) -> tuple[tuple[Look, Facts], ...]:
        """The nodes that answered."""
        return tuple((look, look.facts) for look in self.looks if look.facts is not None)
