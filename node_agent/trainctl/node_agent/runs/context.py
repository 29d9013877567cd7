"""Context that the parts of one agent share: who it is, where it keeps things, and what it speaks and hosts with."""

import dataclasses
import functools
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainctl.node_agent.auth.authenticator import Authenticator
from trainctl.node_agent.records.agent_db import AgentDb
from trainctl.node_agent.runs.late_events import LateEvents
from trainctl.node_agent.runs.preflight import Placement
from trainctl.node_agent.trainers.ipc import TrainerLink
from trainctl.node_agent.trainers.rank_ports import LocalRank
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.client.client import Client
from trainctl.protocol.config import addresses
from trainctl.protocol.config.cluster_file import Cluster
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security.keyring import Credentials, Keyring


@dataclasses.dataclass(frozen=True)
class AgentContext:
    """Made once the agent has bound its sockets."""

    node: str
    boot: str
    address: str  # where it takes requests
    live_address: str  # where it publishes
    directory: Path
    cluster: Cluster
    zmq_context: Any  # of asyncio sockets
    db: AgentDb
    supervisor: TrainerSupervisor
    link: TrainerLink
    publisher: Publisher
    authenticator: Authenticator | None = None  # None: this agent uses no keys

    @property
    def placement(self) -> Placement:
        return Placement(self.address, self.cluster)

    def credentials(self, node: str, address: str) -> Credentials | None:
        """Return what to speak to another agent with; None: no keys are used. Raises InvalidInputError if it can't be
        had."""
        if self.authenticator is not None:
            return self.authenticator.to_peer(node, address)
        if self.cluster.nodes[node].key is not None or not addresses.is_near(address):
            raise InvalidInputError(f"nodes.{node}.key", f"{node} uses keys, but this agent was started without them")
        return None

    @functools.cached_property
    def version(self) -> str:
        """Version of the program."""
        return version("trainctl")

    @functools.cached_property
    def late_events(self) -> LateEvents:
        """Events of runs that other nodes led."""
        return LateEvents(self.db)

    @property
    def keys(self) -> Keyring | None:
        """Return what other agents are asked with; None: no keys are used."""
        return self.authenticator.keyring if self.authenticator is not None else None

    def client(self, address: str, timeout_seconds: float) -> Client:
        """Return a client of another agent."""
        return Client(address, timeout_seconds=timeout_seconds, keys=self.keys, context=self.zmq_context)

    def rank(self, paths: RunPaths, rank: int) -> LocalRank:
        """A rank on this machine."""
        return LocalRank(self.supervisor, self.link, paths, self.node, rank)
