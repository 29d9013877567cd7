"""Rollbacks of runs, in simulated and in real clusters."""

from collections.abc import Callable
from typing import Any

from tests.asking import events_of, run_of
from tests.cluster.run_files import FOREVER, RING
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


def go_back_together(
    client: BlockingClient, run_config: Callable[..., dict[str, Any]], nodes: dict[str, dict[str, Any]]
) -> None:
    """Check that a run of several nodes goes back to step 5 and skips two batches, and that no rank fails."""
    config = run_config(run__steps=FOREVER, nodes=nodes, group=RING, checkpoint=CHECKPOINT)
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
    assert {rank.node: rank.state for rank in run_of(client).ranks} == dict.fromkeys(nodes, "done")  # type: ignore[union-attr]
    assert not [event.text for event in events_of(client, begun.run) if event.severity == "error"]
