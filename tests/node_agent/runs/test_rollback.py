"""A run goes back to a checkpoint by a command, and doesn't train on the data that followed."""

from typing import Any

from tests.asking import events_of, run_of
from tests.cluster.in_process import BlockingAgent, BlockingCluster
from tests.cluster.run_files import FOREVER, NODE, RING, on
from tests.cluster.waits import all_steps, wait_for_checkpoint, wait_for_end, wait_for_step
from tests.waiting import until

from trainctl.protocol.client.blocking import BlockingClient

G = 12
CHECKPOINT = {"every_steps": 5, "keep_last": 1000, "at_end": False}
"""No checkpoint is removed, however many steps a run makes before it is looked at."""


def stop(client: BlockingClient) -> int:
    """End the run, and return its last step."""
    assert client.send("stop", {"checkpoint": False}).state == "applied"
    view = wait_for_end(client)
    assert view.state == "stopped", view.reason
    return view.step


def test_a_run_goes_back_and_skips_the_data_that_followed(agent: BlockingAgent, run_config: Any) -> None:
    with agent.client() as client:
        config = run_config(run__steps=FOREVER, nodes=on(NODE), checkpoint=CHECKPOINT)
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        assert wait_for_checkpoint(client, begun.run or "") == 5
        wait_for_step(client, 7)
        assert client.send("defragment", {}).state == "applied"
        assert client.send("pause", {}).state == "applied"
        refused = client.send("rollback", {"step": 6})
        assert (refused.state, refused.field) == ("rejected", "step")
        reply = client.send("rollback", {"step": 5, "skip_batches": 3})
        assert reply.state == "applied", reply.reason
        assert reply.after is not None and "to step 5 and skip 3 global batches after it" in reply.after

        def is_back() -> bool:
            run = run_of(client)
            return run is not None and (run.state, run.step) == ("paused", 5)

        until(is_back, what="the run, at step 5")
        assert run_of(client).skipped == ((60, 36),)  # type: ignore[union-attr]
        assert client.send("resume", {}).state == "applied"
        wait_for_step(client, 12)
        last = stop(client)
        cursors = {step.step: step.cursor for step in all_steps(client)}
        assert cursors == {step: G * (step if step <= 5 else step + 3) for step in range(1, last + 1)}
        events = events_of(client, begun.run)
        assert not [event.text for event in events if event.severity == "error"]
        texts = [event.text for event in events]
        assert any("positions 60 to 95 are skipped: their samples aren't trained on" in text for text in texts)


def test_several_nodes_go_back_together_and_none_is_said_to_have_failed(
    cluster: BlockingCluster, run_config: Any
) -> None:
    with cluster.client("alpha") as client:
        config = run_config(run__steps=FOREVER, nodes=on("alpha", "beta"), group=RING, checkpoint=CHECKPOINT)
        begun = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        assert wait_for_checkpoint(client, begun.run or "") == 5
        term = run_of(client).generation  # type: ignore[union-attr]
        assert client.send("rollback", {"step": 5, "skip_batches": 2}).state == "applied"
        until(lambda: run_of(client).generation > term, what="the run, at step 5")  # type: ignore[union-attr]
        wait_for_step(client, 12)
        last = stop(client)
        cursors = {step.step: step.cursor for step in all_steps(client)}
        assert cursors == {step: G * (step if step <= 5 else step + 2) for step in range(1, last + 1)}
        assert {rank.node: rank.state for rank in run_of(client).ranks} == {"alpha": "done", "beta": "done"}  # type: ignore[union-attr]
        assert not [event.text for event in events_of(client, begun.run) if event.severity == "error"]
