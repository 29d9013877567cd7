"""A real run goes back to a checkpoint by a command, and doesn't train on the data that followed."""

from typing import Any

from tests.cluster.run_files import FOREVER, RING, on_mlx
from tests.cluster.waits import all_steps, wait_for_checkpoint, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient

G = 12
CHECKPOINT = {"every_steps": 5, "keep_last": 1000, "at_end": False}
"""None goes, however many steps a run makes before it is looked at."""


def stop(client: BlockingClient) -> int:
    """The last step of the run, which ends here."""
    assert client.send("stop", {"checkpoint": False}).state == "applied"
    view = wait_for_end(client)
    assert view.state == "stopped", view.reason
    return view.step


def test_several_nodes_go_back_together_and_none_is_said_to_have_failed(cluster: Cluster, run_config: Any) -> None:
    nodes = on_mlx("alpha", "beta")
    with cluster.client("alpha") as client:
        config = run_config(run__steps=FOREVER, nodes=nodes, group=RING, checkpoint=CHECKPOINT)
        begun = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        assert wait_for_checkpoint(client, begun.run or "") == 5
        term = client.snapshot(0).run.generation  # type: ignore[union-attr]
        assert client.send("rollback", {"step": 5, "skip_batches": 2}).state == "applied"
        until(lambda: client.snapshot(0).run.generation > term, what="the run, at step 5")  # type: ignore[union-attr]
        wait_for_step(client, 12)
        last = stop(client)
        cursors = {step.step: step.cursor for step in all_steps(client)}
        assert cursors == {step: G * (step if step <= 5 else step + 2) for step in range(1, last + 1)}
        assert {rank.node: rank.state for rank in client.snapshot(0).run.ranks} == dict.fromkeys(nodes, "done")  # type: ignore[union-attr]
        assert not [event.text for event in client.events(begun.run, limit=500).events if event.severity == "error"]
