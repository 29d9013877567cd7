"""Runs that go on from a checkpoint of another."""

from tests.cluster.waits import all_steps, wait_for_step
from tests.integration.support.clusters import Cluster

from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.reader import RecordReader


def newest_step(cluster: Cluster, node: str, run: str) -> int:
    folder = checkpoints.newest_complete(cluster.run_paths(node, run).checkpoints)
    return checkpoints.read_manifest(folder).step if folder is not None else 0


def resumed(cluster: Cluster, run: str, at: int) -> None:
    """Take the run up again through its lead; it must go on from step `at` with nothing retracted before it. It is left
    running."""
    with cluster.client("alpha") as client:
        again = client.send("start-run", {"resume": run})
        assert (again.state, again.step) == ("applied", at + 1), again
        wait_for_step(client, at + 3)
        assert [step.step for step in all_steps(client, run)][: at + 3] == list(range(1, at + 4))
    with RecordReader(cluster.run_paths("alpha", run)) as reader:
        (kept,), _ = reader.steps(at - 1, 1)
        assert kept.generation.n < reader.steps(at, 1)[0][0].generation.n
