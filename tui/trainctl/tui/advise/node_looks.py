"""The facts of each node: from its agent, else from its folder on this machine, else from the cluster file."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts, described_link, described_node
from trainctl.protocol.calibration.profile import DeviceProfile, all_profiles, read_profile
from trainctl.protocol.client.client import Client
from trainctl.protocol.config.cluster_file import SimulatedNode
from trainctl.protocol.config.names import node_directory
from trainctl.protocol.errors import InvalidInputError, TrainctlError, UnreachableError
from trainctl.protocol.messages import CalibrationsRequest, Facts, FactsRequest, HostReading, SnapshotRequest
from trainctl.tui.commands.targets import ClusterFile
from trainctl.tui.doctor.probe import try_port

ANSWER_SECONDS = 15.0
"""Time that an agent that listens has for each answer; it may be on a busy machine."""
MOST_PROFILES = 32
"""Newest profiles of a node that are looked at: the most that an agent gives."""


@dataclass(frozen=True)
class NodeLook:
    """One node; None: not known."""

    profiles: tuple[DeviceProfile, ...] = ()  # newest first
    facts: Facts | None = None
    host: HostReading | None = None
    problem: str = ""  # why its agent says nothing


async def look_at(addresses: Mapping[str, str | None]) -> dict[str, NodeLook]:
    """Look at all nodes at once. A node without an address has its folder on this machine only."""
    found = await asyncio.gather(*(_look(node, address) for node, address in addresses.items()))
    return dict(zip(addresses, found, strict=True))


async def _look(node: str, address: str | None) -> NodeLook:
    problem = "no profile of it is on this machine"
    try:
        if address is not None:
            return await _asked(address)
    except TrainctlError as error:
        problem = f"{problem}, and its agent: {error}"
    stored = all_profiles(node_directory(node) / "profiles")
    return NodeLook(tuple(reversed(stored)), problem=problem)


async def _asked(address: str) -> NodeLook:
    """Ask the agent. Raises TrainctlError if it doesn't answer: at once if nothing listens there."""
    trouble = await try_port(address)
    if trouble is not None:
        raise UnreachableError(f"{address}: {trouble.text}")
    async with Client(address, timeout_seconds=ANSWER_SECONDS) as client:
        host = (await client.ask(SnapshotRequest, 0)).node.host
        profiles = (await client.ask(CalibrationsRequest, MOST_PROFILES)).profiles
        return NodeLook(profiles, await client.ask(FactsRequest), host)


def descriptions(cluster: ClusterFile | None) -> dict[str, SimulatedNode]:
    """Return the facts by node."""
    nodes = cluster.cluster.nodes if cluster is not None else {}
    return {name: entry.simulated for name, entry in nodes.items() if entry.simulated is not None}


def with_described(facts: AdviceFacts, cluster: ClusterFile | None) -> AdviceFacts:
    """Return the looks with the figures of described nodes. Raises InvalidInputError for a profile that isn't there."""
    found = descriptions(cluster)
    if cluster is None or not found:
        return facts
    given = {name: _given(node, name, cluster.path) for name, node in found.items()}
    nodes = tuple(_described(node, found, given) for node in facts.nodes)
    others = [node.name for node in nodes if node.described and node.name != facts.run.lead]
    links = {name: described_link(found[name], given[name], facts.run.lead) for name in others}
    return msgspec.structs.replace(facts, nodes=nodes, links={**facts.links, **links})


def _described(
    node: NodeFacts, found: Mapping[str, SimulatedNode], given: Mapping[str, DeviceProfile | None]
) -> NodeFacts:
    if node.name not in found:
        return node
    return described_node(node, found[node.name], given[node.name])


def _given(node: SimulatedNode, name: str, path: Path) -> DeviceProfile | None:
    """Return the profile that a description names."""
    if not node.profile:
        return None
    file = path.parent / Path(node.profile).expanduser()
    if not file.is_file():
        raise InvalidInputError(f"{path}: nodes.{name}.simulated.profile", f"no such file: {file}")
    return read_profile(file)
