"""A lead that has let go of its run: it conducts no other one in its place."""

import time

from tests.integration.clusters import FOREVER, on
from tests.integration.conftest import until, wait_for_end, wait_for_step
from tests.integration.succession import promote, view_at

from trainctl.node_agent.follower import RECLAIM_SECONDS


def test_who_handed_over_one_run_follows_another_for_as_long_as_that_takes(cluster, run_config):
    """The lead of the first has no rank in it, and so never learns that its claimant began."""
    with cluster.client("gamma") as client:
        config = run_config(run__steps=FOREVER, nodes=on("alpha"))
        assert client.send("start-run", {"config": config}, timeout_seconds=120).state == "applied"
        wait_for_step(client, 1)
    assert promote(cluster, "alpha", through="gamma").state == "applied"
    handed_over = time.monotonic()
    with cluster.client("alpha") as client:
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
        config = run_config(run__steps=FOREVER, nodes=on("alpha", "gamma"))
        until(lambda: client.send("start-run", {"config": config}, timeout_seconds=120).state == "applied", 60, "it")
        term = client.snapshot(0).run.generation.term
        until(lambda: time.monotonic() - handed_over > RECLAIM_SECONDS + 1, 30, "the time in which it was waited for")
        before = client.snapshot(0).run.step
        view = wait_for_step(client, before + 3).run
        assert (view.lead, view.generation.term, {rank.state for rank in view.ranks}) == ("alpha", term, {"run"})
    assert view_at(cluster, "gamma").lead == "alpha"
