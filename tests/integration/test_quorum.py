"""A lead that may go on only with a majority of nodes in reach, one of which comes back at another address."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.conftest import AgentProcess, until, wait_for_end, wait_for_step
from tests.integration.support.clusters import FOREVER, Cluster, on_mlx, plans_of
from tests.integration.support.ports import free_addresses

from trainctl.protocol.client.blocking import BlockingClient


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Cluster]:
    """Three agents whose cluster file wants a quorum."""
    made = Cluster(tmp_path, quorum=True)
    yield made
    made.stop()


def move(cluster: Cluster, node: str, folder: Path) -> AgentProcess:
    """A node's agent by a file of its own, in which it has another address; the others don't know of it."""
    (address,) = free_addresses(1)
    known = cluster[node].address
    file = folder / "moved.toml"
    file.write_text(cluster.file.read_text().replace(known, address))
    moved = cluster.agents[node] = AgentProcess(folder / "state", node, file)
    cluster.start(node)
    assert moved.address == address != known
    return moved


def still(cluster: Cluster, client: BlockingClient) -> int:
    """The step that the run stands at, 0 as long as a step that was planned before is still to come."""
    view = client.snapshot(0).run
    planned = plans_of(cluster.run_paths("alpha", view.run))
    return view.step if view.step == max(plan.step for plan in planned if plan.kind == "train") else 0


def test_no_step_is_made_without_a_majority_and_a_node_at_another_address_is_found(strict, run_config, tmp_path):
    strict.in_touch()
    with strict.client("alpha") as client:
        config = run_config(run__steps=FOREVER, nodes=on_mlx("alpha"))
        assert client.send("start-run", {"config": config}).state == "applied"
        wait_for_step(client, 3)
        strict["beta"].kill()
        went_on = wait_for_step(client, client.snapshot(0).run.step + 20).run
        assert (went_on.state, went_on.reason) == ("running", "")
        strict["gamma"].kill()
        stands = until(lambda: (v := client.snapshot(0).run).state == "starting" and v, 20, "the standstill")
        assert "1 of 3 nodes reachable, a majority is 2; missing: beta, gamma" in stands.reason
        step = until(lambda: still(strict, client), what="the end of the last step")
        # What is not for a step is still done.
        assert client.send("checkpoint", {}).state == "applied"
        assert client.snapshot(0).run.step == step
        move(strict, "beta", tmp_path)
        wait_for_step(client, step + 20)
        peers = {peer.node: (peer.address, peer.state) for peer in client.snapshot(0).peers}
        assert peers["beta"] == (strict["beta"].address, "connected")
        texts = [event.text for event in client.events(limit=100).events]
        assert any(text.startswith("training is waiting: 1 of 3 nodes reachable") for text in texts)
        assert any("enough nodes are reachable" in text for text in texts)
        assert any(f"beta's agent is now at {strict['beta'].address}" in text for text in texts)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        assert wait_for_end(client).state == "stopped"
    strict.start("gamma")
