"""A lead that has let go of its run: it conducts no other one in its place."""

import time

import zmq
from tests.cluster.greeter import claim
from tests.cluster.run_files import FOREVER, RING, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.support.transfer import promote, view_at
from tests.waiting import until

from trainctl.node_agent.roles.followed_run import RECLAIM_SECONDS


def test_who_handed_over_one_run_follows_another_for_as_long_as_that_takes(cluster, run_config):
    """The lead of the first has no rank in it, and so never learns that its claimant began."""
    with cluster.client("gamma") as client:
        config = run_config(run__steps=FOREVER, nodes=on_mlx("alpha"))
        assert client.send("start-run", {"config": config}).state == "applied"
        wait_for_step(client, 1)
    assert promote(cluster, "alpha", through="gamma").state == "applied"
    handed_over = time.monotonic()
    with cluster.client("alpha") as client:
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
        config = run_config(run__steps=FOREVER, nodes=on_mlx("alpha", "gamma"), group=RING)
        until(lambda: client.send("start-run", {"config": config}).state == "applied", 60, "it")
        term = client.snapshot(0).run.generation.term
        assert client.send("pause", {}).state == "applied"  # what takes the run back doesn't need its steps
        until(lambda: time.monotonic() - handed_over > RECLAIM_SECONDS + 1, 30, "the time in which it was waited for")
        assert client.send("resume", {}).state == "applied"
        before = client.snapshot(0).run.step
        view = wait_for_step(client, before + 3).run
        assert (view.lead, view.generation.term, {rank.state for rank in view.ranks}) == ("alpha", term, {"run"})
    assert view_at(cluster, "gamma").lead == "alpha"


def test_a_lead_keeps_its_run_after_a_refused_promotion_and_takes_back_what_nobody_took(cluster, run_config):
    with cluster.client("alpha") as client:
        config = run_config(run__steps=FOREVER, nodes=on_mlx("alpha", "beta"), group=RING)
        assert client.send("start-run", {"config": config}).state == "applied"
        step = wait_for_step(client, 3).run.step
    refuse_a_promotion(cluster, step)
    restart_a_lead_that_handed_over(cluster)


def refuse_a_promotion(cluster, step):
    """Had the node that asked for it promised a newer term to itself, it would no longer obey the lead."""
    cluster["alpha"].kill()
    cluster["gamma"].kill()
    with cluster.client("beta") as client:
        until(lambda: {peer.state for peer in client.snapshot(0).peers} == {"silent"}, 20, "the silence")
    refused = promote(cluster, "beta", through="beta")
    assert refused.state == "rejected" and "1 of 3 nodes agree" in refused.reason
    cluster.start("alpha")
    cluster.start("gamma")
    with cluster.client("alpha") as client:
        view = wait_for_step(client, step + 3).run
        assert (view.lead, {rank.state for rank in view.ranks}) == ("alpha", {"run"})


def restart_a_lead_that_handed_over(cluster):
    """What it waits for is in its record, not in the process that handed over; done with, it is waited for no more."""
    with cluster.client("alpha") as client:
        before = client.snapshot(0).run
        with zmq.Context() as context:
            assert not claim(context, cluster["alpha"].address, "beta", before).refusal
    assert view_at(cluster, "alpha").lead == "beta"
    cluster["alpha"].kill()
    cluster.start("alpha")
    assert view_at(cluster, "alpha").lead == "beta"
    view = until(
        lambda: (v := view_at(cluster, "alpha")).lead == "alpha" and v.state == "running" and v, 60, "its lead"
    )
    assert view.generation.term > before.generation.term + 1
    with cluster.client("alpha") as client:
        wait_for_step(client, view.step + 3)
    assert promote(cluster, "beta", through="beta").state == "applied"
    handed_over = time.monotonic()
    cluster["alpha"].kill()
    cluster.start("alpha")
    with cluster.client("beta") as client:
        assert client.send("pause", {}).state == "applied"
    until(lambda: time.monotonic() - handed_over > RECLAIM_SECONDS + 2, 30, "the time in which it would be taken back")
    assert view_at(cluster, "alpha").lead == "beta"
    with cluster.client("beta") as client:
        assert client.send("resume", {}).state == "applied"
        view = wait_for_step(client, client.snapshot(0).run.step + 3).run
        assert view.lead == "beta"
        until(lambda: {rank.state for rank in client.snapshot(0).run.ranks} == {"run"}, 60, "both ranks")
