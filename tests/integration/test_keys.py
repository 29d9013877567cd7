"""Real agents that use keys; tests/node_agent/auth/test_keys.py has what each role may do."""

from pathlib import Path

import pytest
from tests.integration.conftest import AgentProcess
from tests.integration.support.ports import free_addresses
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file
from trainctl.protocol.errors import NotAuthorisedError
from trainctl.protocol.messages import RunsRequest, SnapshotRequest
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder

ROLES = {"anna": "operator", "vera": "viewer", "mallory": None}


def test_agents_speak_by_keys_to_each_other_and_to_those_that_are_authorized(tmp_path: Path) -> None:
    people = {name: KeyFolder(tmp_path / name) for name in ROLES}
    for name, folder in people.items():
        folder.make(name)
    nodes, tables = {node: KeyFolder(tmp_path / node) for node in ("one", "two")}, []
    for (node, folder), at in zip(nodes.items(), free_addresses(2), strict=True):
        folder.make(node)
        for name, role in ROLES.items():
            if role is not None:
                folder.authorize(name, people[name].user().public, role)
        tables.append(f'[nodes.{node}]\naddress = "{at}"\nkey = "{folder.agent().public}"\n')
    file = tmp_path / "cluster.toml"
    file.write_text("".join(tables))
    agents = [AgentProcess(tmp_path / "state", node, file, nodes[node].path).start() for node in nodes]

    def client(name: str) -> BlockingClient:
        return agents[0].client(keys=Keyring(people[name], cluster_file.read(file)))

    try:
        with client("anna") as anna, client("vera") as vera, client("mallory") as mallory:
            until(lambda: anna.ask(SnapshotRequest, 0).peers[0].state == "connected", 20, "the other agent")
            assert vera.ask(RunsRequest).runs == ()
            with pytest.raises(NotAuthorisedError, match="viewer"):
                vera.send("pause", {})
            with pytest.raises(NotAuthorisedError, match="trainctl keys authorize"):
                mallory.ask(SnapshotRequest, 0)
            nodes["one"].revoke("vera")
            with pytest.raises(NotAuthorisedError, match="no longer"):
                vera.ask(RunsRequest)
    finally:
        for agent in agents:
            agent.clean_up()
