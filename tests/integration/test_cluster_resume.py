"""A real run of two nodes taken up again; tests/node_agent/runs/test_cluster_resume.py has who may, and from where."""

from tests.asking import run_of
from tests.cluster.run_files import FOREVER, RING, on_mlx
from tests.cluster.waits import newest_step, resumed, wait_for_end, wait_for_step
from tests.waiting import until


def test_it_goes_on_from_the_newest_checkpoint_which_another_node_has(cluster, run_config):
    """The lead's node was drained before it was written."""
    config = run_config(run__steps=FOREVER, batch__global=8, nodes=on_mlx("alpha", "beta"), group=RING)
    with cluster.client("alpha") as client:
        run = client.send("start-run", {"config": config}).run
        wait_for_step(client, 3)
        assert client.send("drain", {}, node="alpha").state == "applied"
        wait_for_step(client, run_of(client).step + 3)
        client.send("stop", {"checkpoint": True})
        at = wait_for_end(client).step
    assert (newest_step(cluster, "alpha", run), newest_step(cluster, "beta", run)) == (0, at)
    until(lambda: not any(cluster.trainers().values()), 20, "the trainers' end")
    resumed(cluster, run, at)
