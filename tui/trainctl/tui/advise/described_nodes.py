"""Nodes that the cluster file describes for `trainctl simulate`: advice takes them as described."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, NodeFacts
from trainctl.protocol.advice.described_node import described_link, described_node
from trainctl.protocol.calibration import profile_file
from trainctl.protocol.calibration.profile import DeviceProfile
from trainctl.protocol.config.simulated_nodes import SimulatedNode
from trainctl.protocol.errors import InvalidInputError
from trainctl.tui.commands.targets import ClusterFile


def descriptions(cluster: ClusterFile | None) -> dict[str, SimulatedNode]:
    """By node."""
    nodes = cluster.cluster.nodes if cluster is not None else {}
    return {name: entry.simulated for name, entry in nodes.items() if entry.simulated is not None}


def with_described(facts: AdviceFacts, cluster: ClusterFile | None) -> AdviceFacts:
    """With the figures of described nodes. Raises InvalidInputError for a profile that isn't there."""
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
) -> NodeFacts:  # fmt: skip
    if node.name not in found:
        return node
    return described_node(node, found[node.name], given[node.name])


def _given(node: SimulatedNode, name: str, path: Path) -> DeviceProfile | None:
    """The profile that a description names."""
    if not node.profile:
        return None
    file = path.parent / Path(node.profile).expanduser()
    if not file.is_file():
        raise InvalidInputError(f"{path}: nodes.{name}.simulated.profile", f"no such file: {file}")
    return profile_file.read(file)
