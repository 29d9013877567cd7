"""What the parts of one agent share: who it is, where it keeps things, and what it speaks and hosts with."""

import dataclasses
import functools
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trainctl.node_agent.host import TrainerHost
from trainctl.node_agent.ledger import AgentLedger
from trainctl.node_agent.ports import LocalRank
from trainctl.node_agent.publisher import Publisher
from trainctl.node_agent.trainer_link import TrainerLink
from trainctl.protocol.cluster import Cluster
from trainctl.protocol.paths import RunPaths


@dataclasses.dataclass(frozen=True)
class Equipment:
    """Made once the agent has bound its sockets."""

    node: str
    boot: str
    address: str  # where it takes requests
    live_address: str  # where it publishes
    directory: Path
    cluster: Cluster
    context: Any  # of asyncio sockets
    ledger: AgentLedger
    host: TrainerHost
    link: TrainerLink
    publisher: Publisher

    @functools.cached_property
    def version(self) -> str:
        """Of the program."""
        return version("trainctl")

    def rank(self, paths: RunPaths, rank: int) -> LocalRank:
        """A rank on this machine."""
        return LocalRank(self.host, self.link, paths, self.node, rank)
