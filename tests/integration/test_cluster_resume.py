"""Runs of several nodes taken up again: from the newest checkpoint, on whichever node it is, or refused by name."""

import shutil

import pytest
from tests.integration.clusters import FOREVER, Cluster, on
from tests.integration.conftest import all_steps, until, wait_for_end, wait_for_step

from trainctl.protocol import checkpoints
from trainctl.protocol.blocking import BlockingClient
from trainctl.protocol.reader import RecordReader


def newest_step(cluster: Cluster, node: str, run: str) -> int:
    folder = checkpoints.newest_complete(cluster.run_paths(node, run).checkpoints)
    return checkpoints.read_manifest(folder).step if folder is not None else 0


def resumed(cluster: Cluster, run: str, at: int) -> None:
    """Take the run up again through its lead; it must go on from step `at` with nothing retracted before it. It is left
    running."""
    with cluster.client("alpha") as client:
        again = client.send("start-run", {"resume": run}, timeout_seconds=120)
        assert (again.state, again.step) == ("applied", at + 1), again
        wait_for_step(client, at + 3)
        assert [step.step for step in all_steps(client, run)][: at + 3] == list(range(1, at + 4))
    with RecordReader(cluster.run_paths("alpha", run)) as reader:
        (kept,), _ = reader.steps(at - 1, 1)
        assert kept.generation.n < reader.steps(at, 1)[0][0].generation.n


def test_the_lead_has_no_rank_and_the_checkpoint_is_on_the_node_that_has(cluster, run_config):
    with cluster.client("alpha") as client:
        run = client.send("start-run", {"config": run_config(run__steps=FOREVER, nodes=on("beta"))}).run
        wait_for_step(client, 5)
        client.send("stop", {})
        at = wait_for_end(client).step
    assert (newest_step(cluster, "alpha", run), newest_step(cluster, "beta", run)) == (0, at)
    resumed(cluster, run, at)
    stop(cluster, checkpoint=False)
    shutil.rmtree(cluster.run_paths("beta", run).checkpoints / f"step-{at}")
    until(lambda: not any(cluster.trainers().values()), 20, "the trainers' end")
    with cluster.client("alpha") as client:
        refused = client.send("start-run", {"resume": run})
    assert (refused.state, refused.field) == ("rejected", "resume")
    assert "beta" in refused.reason and f"step-{at}" in refused.reason


@pytest.mark.timeout(240)
def test_the_lead_s_node_was_drained_and_the_newest_checkpoint_is_elsewhere(cluster, run_config):
    """Drained some steps after its own checkpoint, and then at the very step after it: its state is the one to go on
    from only if none is newer."""
    config = run_config(run__steps=FOREVER, batch__global=8, nodes=on("alpha", "beta"))
    with cluster.client("alpha") as client:
        run = client.send("start-run", {"config": config}, timeout_seconds=120).run
        wait_for_step(client, 3)
        own = paused_with_checkpoint(client)
        client.send("resume", {})
        wait_for_step(client, own + 3)
        client.send("drain", {}, node="alpha")
        wait_for_step(client, own + 6)
    at = stop(cluster, checkpoint=True)
    assert newest_step(cluster, "alpha", run) == own
    resumed(cluster, run, at)
    with cluster.client("alpha") as client:
        # It is still drained, and refused while its trainer loads.
        until(lambda: client.send("admit", {}, node="alpha", timeout_seconds=120).state == "applied", 60, "its return")
        own = paused_with_checkpoint(client)
        client.send("drain", {}, node="alpha")
        client.send("resume", {})
        wait_for_step(client, own + 3)
    stop(cluster, checkpoint=False)
    assert newest_step(cluster, "alpha", run) == own
    resumed(cluster, run, own)
    stop(cluster, checkpoint=False)


def paused_with_checkpoint(client: BlockingClient) -> int:
    """The step that the run stands at, with a checkpoint of it."""
    client.send("pause", {})
    step = client.send("checkpoint", {}).step
    assert step is not None
    return step


def stop(cluster: Cluster, *, checkpoint: bool) -> int:
    """The last step of the run, which alpha conducts."""
    with cluster.client("alpha") as client:
        client.send("stop", {"checkpoint": checkpoint})
        return wait_for_end(client).step
