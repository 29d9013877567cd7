"""A lead that hands its run over: what it passes on, and when it takes it back."""

import time
from pathlib import Path

import pytest
import zmq
from tests.asking import events_of, run_of
from tests.cluster.greeter import claim
from tests.cluster.in_process import RECLAIM_SECONDS, BlockingCluster
from tests.cluster.run_files import FOREVER, NODES, RING, on
from tests.cluster.waits import promote, wait_for_end, wait_for_step
from tests.waiting import until

from trainctl.protocol.messages import DryRun, DryRunRequest, EventsRequest, RunsRequest, SnapshotRequest
from trainctl.protocol.record.reader import RecordReader


def started(cluster: BlockingCluster, through: str, config: dict) -> str:
    with cluster.client(through) as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        wait_for_step(client, 3)
    return begun.run


def silent(cluster: BlockingCluster, node: str) -> set[str]:
    with cluster.client(node) as client:
        return {peer.node for peer in client.ask(SnapshotRequest, 0).peers if peer.state == "silent"}


def foreseen(cluster: BlockingCluster, node: str, through: str) -> DryRun:
    with cluster.client(through) as client:
        return client.ask(DryRunRequest, "promote", node=node)


def test_who_has_no_copy_of_a_run_or_conducts_it_is_not_promoted(cluster, run_config):
    for through in ("alpha", "beta"):
        said, reply = foreseen(cluster, "beta", through), promote(cluster, "beta", through)
        assert (reply.state, reply.field) == ("rejected", "node") and "no rank in an active run" in reply.reason
        assert (said.field, said.refused) == (reply.field, reply.reason)
    said, reply = foreseen(cluster, "nowhere", "alpha"), promote(cluster, "nowhere", "alpha")
    assert (reply.state, reply.field) == ("rejected", "node") and "no node 'nowhere'" in reply.reason
    assert (said.field, said.refused) == (reply.field, reply.reason)
    with cluster.client("alpha") as client:
        reply = client.send("promote", {})
        assert (reply.state, reply.field, reply.reason) == ("rejected", "node", "promote needs a node: add --node NAME")
    started(cluster, "alpha", run_config(run__steps=FOREVER, nodes=on("alpha")))
    assert promote(cluster, "alpha", through="beta").field == "node"
    assert foreseen(cluster, "alpha", through="beta").refused.startswith("alpha already leads")
    with cluster.client("alpha") as client:
        said = client.ask(DryRunRequest, "start-run", args={"resume": "any"})
        assert said.refused.endswith("is active (one run at a time)")


def test_the_lead_goes_from_node_to_node_without_the_loss_of_a_rank(cluster, run_config):
    run = started(cluster, "alpha", run_config(run__steps=FOREVER, nodes=on(*NODES), group=RING))
    term = cluster.view("alpha").generation.term
    for micro, (node, before) in enumerate((("gamma", "alpha"), ("alpha", "gamma")), 1):
        said, reply = foreseen(cluster, node, "beta"), promote(cluster, node, through=before)
        assert (reply.state, reply.before) == ("applied", f"{before} leads"), reply
        assert (said.refused, said.before, said.after) == ("", reply.before, reply.after)
        view = until(lambda node=node: (v := cluster.view(node)).lead == node and v.state == "running" and v, 30)
        assert view.generation.term > term
        term = view.generation.term
        assert {rank.state for rank in view.ranks} == {"run"}
        with cluster.client("beta") as client:  # any agent still takes a command, and its answer comes from the lead
            assert client.send("resize-batch", {"micro": micro}).state == "applied"
    with cluster.client("beta") as client:
        events = until(
            lambda: (
                (e := events_of(client, run))
                and [one.verb for one in e if one.outcome == "applied"][-4:] == ["promote", "resize-batch"] * 2
                and e
            ),
            what="the events of both leads",
        )
    assert not [event.text for event in events if " is lost" in event.text]


def test_a_lead_that_is_gone_is_replaced_by_a_majority_or_by_the_word_that_it_is_off(cluster, run_config):
    started(cluster, "alpha", run_config(run__steps=FOREVER, nodes=on(*NODES), group=RING))
    note = {"verb": "note", "args": {"text": "before"}, "id": "00000000-0000-4000-8000-000000000001"}
    with cluster.client("alpha") as client:
        asked = client.send(**note)
        wait_for_step(client, asked.step + 3)
    cluster["alpha"].power_off()
    assert promote(cluster, "gamma", through="beta").state == "applied"
    view = until(lambda: (v := cluster.view("gamma")).state == "running" and v, what="the others' going on")
    with cluster.client("gamma") as client:
        again = client.send(**note)
        assert (again.state, again.step) == (asked.state, asked.step)
        wait_for_step(client, view.step + 3)
    cluster["gamma"].kill()
    until(lambda: silent(cluster, "beta") == {"alpha", "gamma"}, what="the silence")
    refused = promote(cluster, "beta", through="beta")
    assert (refused.state, refused.field) == ("rejected", "node")
    assert "1 of 3 nodes agree, but a majority is 2" in refused.reason and "--old-lead-is-off" in refused.reason
    assert cluster.view("beta").lead == "gamma"
    assert promote(cluster, "beta", through="beta", off=True).state == "applied"
    for node in ("gamma", "alpha"):
        cluster[node].start()
    until(lambda: {cluster.view(node).lead for node in NODES} == {"beta"}, what="one lead")
    with cluster.client("beta") as client:
        until(lambda: {rank.state for rank in run_of(client).ranks} == {"run"}, what="all ranks")


def test_a_promotion_that_a_node_in_another_run_prevents_leaves_the_run_to_its_lead(cluster, run_config):
    run = started(cluster, "alpha", run_config(run__steps=FOREVER, nodes=on("alpha", "beta"), group=RING))
    started(cluster, "gamma", run_config(run__name="another", run__steps=FOREVER, nodes=on("gamma")))
    cluster["alpha"].power_off()
    until(lambda: "alpha" in silent(cluster, "beta"), what="the silence")
    refused = promote(cluster, "beta", through="beta")
    assert (refused.state, refused.field) == ("rejected", "node")
    assert "gamma refuses: gamma takes part in another" in refused.reason
    step = cluster.view("beta").step
    cluster["alpha"].start()
    with cluster.client("alpha") as client:
        assert wait_for_step(client, step + 3).run.run == run, "it is led as before"
    assert cluster.view("beta").lead == "alpha"


def test_a_lead_without_a_rank_tells_how_the_run_is_that_it_has_handed_over(cluster, run_config):
    run = started(cluster, "alpha", run_config(run__steps=FOREVER, nodes=on("beta")))
    with cluster.client("alpha") as client:
        assert promote(cluster, "beta", through="alpha").state == "applied"
        view = until(lambda: (v := run_of(client)).state == "running" and v, 30, "the going on")
        led = cluster.view("beta")
        assert (view.run, view.lead, view.generation.term) == (run, "beta", led.generation.term)
        (row,) = [row for row in client.ask(RunsRequest).runs if row.run == run]
        assert (row.state, row.lead, row.nodes, row.stale) == ("running", "beta", ("beta",), False)
        # Its copy, read from the disk, says where the rest of the record is.
        with RecordReader(Path(row.directory)) as copy:
            kept = copy.view()
        assert kept is not None and kept.state == "stopped" and kept.reason.startswith("beta leads it")
        # What it is asked to change is for its lead.
        assert client.send("pause", {}).state == "applied"
        assert cluster.view("beta").state == "paused"
        cluster["beta"].kill()
        until(lambda: "beta" in silent(cluster, "alpha"), 20, "the silence")
        (row,) = [row for row in client.ask(RunsRequest).runs if row.run == run]
        assert (row.lead, row.stale) == ("beta", True)
        assert "lead beta is unreachable" in run_of(client).reason
        cluster["beta"].start()
        until(lambda: not silent(cluster, "alpha"), 20, "the return")
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        until(lambda: run_of(client).state == "stopped", 30, "the end")
    assert cluster.view("beta").state == "stopped"


def test_who_handed_over_one_run_follows_another_for_as_long_as_that_takes(cluster, run_config):
    """The lead of the first has no rank in it, and so never learns that its claimant began."""
    started(cluster, "gamma", run_config(run__steps=FOREVER, nodes=on("alpha")))
    assert promote(cluster, "alpha", through="gamma").state == "applied"
    handed_over = time.monotonic()
    with cluster.client("alpha") as client:
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
        config = run_config(run__steps=FOREVER, nodes=on("alpha", "gamma"), group=RING)
        until(lambda: client.send("start-run", {"config": config}).state == "applied", 60, "it")
        term = run_of(client).generation.term
        until(lambda: time.monotonic() - handed_over > RECLAIM_SECONDS + 0.5, 30, "the time in which it was waited for")
        view = wait_for_step(client, run_of(client).step + 3).run
        assert (view.lead, view.generation.term) == ("alpha", term)
        ranks = [(rank.node, rank.state, rank.why) for rank in view.ranks]
        assert {state for _, state, _ in ranks} == {"run"}, (
            ranks,
            [event.text for event in client.ask(EventsRequest).events],
        )
    assert cluster.view("gamma").lead == "alpha"


@pytest.fixture
def led_by_alpha(cluster, run_config) -> BlockingCluster:
    """Agents with a run of alpha and beta."""
    started(cluster, "alpha", run_config(run__steps=FOREVER, nodes=on("alpha", "beta"), group=RING))
    return cluster


def test_a_lead_keeps_its_run_after_a_refused_promotion(led_by_alpha):
    """Had the node that asked for it promised a newer term to itself, it would no longer obey the lead."""
    cluster = led_by_alpha
    step = cluster.view("alpha").step
    for node in ("alpha", "gamma"):
        cluster[node].kill()
    until(lambda: silent(cluster, "beta") == {"alpha", "gamma"}, 20, "the silence")
    refused = promote(cluster, "beta", through="beta")
    assert refused.state == "rejected" and "1 of 3 nodes agree" in refused.reason
    for node in ("alpha", "gamma"):
        cluster[node].start()
    with cluster.client("alpha") as client:
        view = wait_for_step(client, step + 3).run
        assert (view.lead, {rank.state for rank in view.ranks}) == ("alpha", {"run"})


def test_a_lead_takes_back_what_nobody_took_also_when_it_was_started_again(led_by_alpha):
    """The lead's record says what it waits for, not the process that handed over. A stranger's claim is refused."""
    cluster = led_by_alpha
    before = cluster.view("alpha")
    with zmq.Context() as context:
        for name, is_refused in (("omega", True), ("beta", False)):
            assert bool(claim(context, cluster["alpha"].address, name, before).refusal) == is_refused
    assert cluster.view("alpha").lead == "beta"
    cluster["alpha"].kill()
    cluster["alpha"].start()
    assert cluster.view("alpha").lead == "beta"
    view = until(lambda: (v := cluster.view("alpha")).lead == "alpha" and v.state == "running" and v, 60, "its lead")
    assert view.generation.term > before.generation.term + 1
    with cluster.client("alpha") as client:
        wait_for_step(client, view.step + 3)


def test_a_lead_that_was_started_again_does_not_take_back_what_another_leads(led_by_alpha):
    cluster = led_by_alpha
    assert promote(cluster, "beta", through="beta").state == "applied"
    handed_over = time.monotonic()
    cluster["alpha"].kill()
    cluster["alpha"].start()
    until(lambda: time.monotonic() - handed_over > RECLAIM_SECONDS + 0.5, 30, "the time in which it would take it back")
    assert cluster.view("alpha").lead == "beta"
    with cluster.client("beta") as client:
        view = wait_for_step(client, run_of(client).step + 3).run
        assert view.lead == "beta"
        until(lambda: {rank.state for rank in run_of(client).ranks} == {"run"}, 60, "both ranks")


def test_each_node_shows_an_ended_run_as_its_lead_did(led_by_alpha):
    """Also the one that led it before and took part until the end: with all ranks, shares and the learning rate."""
    cluster, run = led_by_alpha, led_by_alpha.view("alpha").run
    assert promote(cluster, "beta", through="alpha").state == "applied"
    with cluster.client("beta") as client:
        wait_for_step(client, run_of(client).step + 3)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        ended = wait_for_end(client)

    def shown(node: str) -> tuple[object, ...]:
        with cluster.client(node) as client:
            view = client.ask(SnapshotRequest, 0, run).run
        ranks = [(rank.node, rank.share, rank.micro_batch, rank.backend) for rank in view.ranks]
        return view.state, view.lead, view.step, view.learning_rate, ranks, Path(view.directory).parents[1].name

    whole = shown("beta")
    assert whole[:3] == ("stopped", "beta", ended.step) and [rank[:2] for rank in whole[4]] == [
        ("alpha", 6),
        ("beta", 6),
    ]
    until(lambda: shown("alpha") == (*whole[:-1], "alpha"), 30, "the same on alpha")
