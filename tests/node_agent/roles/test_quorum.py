"""A lead that may go on only with a majority of nodes in reach, one of which comes back at another address."""

from tests.asking import run_of
from tests.cluster.in_process import BlockingCluster, blocking_cluster
from tests.cluster.run_files import FOREVER, on
from tests.cluster.waits import plans_of, wait_for_end, wait_for_step
from tests.integration.support.ports import free_addresses
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file
from trainctl.protocol.messages import EventsRequest, SnapshotRequest


def still(cluster: BlockingCluster, client: BlockingClient) -> int:
    """The step that the run stands at, 0 as long as a step that was planned before is still to come."""
    view = run_of(client)
    planned = plans_of(cluster.run_paths("alpha", view.run))
    return view.step if view.step == max(plan.step for plan in planned if plan.kind == "train") else 0


def test_no_step_is_made_without_a_majority_and_a_node_at_another_address_is_found(run_config, tmp_path):
    with blocking_cluster(tmp_path, quorum=True) as strict, strict.client("alpha") as client:
        assert (
            client.send("start-run", {"config": run_config(run__steps=FOREVER, nodes=on("alpha"))}).state == "applied"
        )
        wait_for_step(client, 3)
        strict["beta"].kill()
        until(
            lambda: {peer.node: peer.state for peer in client.ask(SnapshotRequest, 0).peers}["beta"] == "silent",
            what="silence",
        )
        went_on = wait_for_step(client, run_of(client).step + 5).run
        assert (went_on.state, went_on.reason) == ("running", "")
        strict["gamma"].kill()
        stands = until(lambda: (v := run_of(client)).state == "starting" and v, 20, "the standstill")
        assert "1 of 3 nodes reachable, a majority is 2; missing: beta, gamma" in stands.reason
        step = until(lambda: still(strict, client), what="the end of the last step")
        # What is not for a step is still done.
        assert client.send("checkpoint", {}).state == "applied"
        assert run_of(client).step == step
        beta = strict["beta"].inner
        (moved,) = free_addresses(1)
        strict.file.write_text(strict.file.read_text().replace(beta.address, moved))
        beta.cluster, beta.address = cluster_file.read(strict.file), moved  # the others don't know of it
        strict["beta"].start()
        wait_for_step(client, step + 5)
        peers = {peer.node: (peer.address, peer.state) for peer in client.ask(SnapshotRequest, 0).peers}
        assert peers["beta"] == (moved, "connected")
        texts = [event.text for event in client.ask(EventsRequest, limit=100).events]
        assert any(text.startswith("training is waiting: 1 of 3 nodes reachable") for text in texts)
        assert any("enough nodes are reachable" in text for text in texts)
        assert any(f"beta's agent is now at {moved}" in text for text in texts)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        assert wait_for_end(client).state == "stopped"
