"""Runs of several nodes taken up again: from the newest checkpoint, on whichever node it is, or refused by name."""

from typing import Any

import pytest
from tests.asking import run_of
from tests.cluster.in_process import BlockingCluster
from tests.cluster.run_files import FOREVER, NODES, RING, on
from tests.cluster.waits import all_steps, newest_step, resumed, wait_for_end, wait_for_step
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient


@pytest.fixture
def started(cluster, run_config) -> tuple[str, dict[str, Any]]:
    """A run of alpha and beta that goes on and on, and its run file."""
    config = run_config(run__steps=FOREVER, batch__global=8, nodes=on("alpha", "beta"), group=RING)
    with cluster.client("alpha") as client:
        run = client.send("start-run", {"config": config}).run
        wait_for_step(client, 3)
    return run, config


def test_it_goes_on_from_the_newest_checkpoint_whichever_node_has_it(cluster, started):
    """Some steps after its own checkpoint, and then at the very step after it: its state is the one to go on from only
    if none is newer."""
    run, _ = started
    with cluster.client("alpha") as client:
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
        client.send("pause", {})
        until(lambda: all(rank.backend for rank in run_of(client).ranks), 60, "its trainer")
        until(lambda: client.send("admit", {}, node="alpha").state == "applied", 60, "its return")
        client.send("resume", {})
        own = paused_with_checkpoint(client)
        client.send("drain", {}, node="alpha")
        client.send("resume", {})
        wait_for_step(client, own + 3)
    stop(cluster, checkpoint=False)
    assert newest_step(cluster, "alpha", run) == own
    resumed(cluster, run, own)


def all_take_part(client: BlockingClient) -> None:
    until(lambda: {rank.state for rank in run_of(client).ranks} == {"run"}, what="all ranks")


def paused_with_checkpoint(client: BlockingClient) -> int:
    """The step that the run stands at, with a checkpoint of it."""
    client.send("pause", {})
    step = client.send("checkpoint", {}).step
    assert step is not None
    return step


def stop(cluster: BlockingCluster, *, checkpoint: bool) -> int:
    """The last step of the run, which alpha conducts."""
    with cluster.client("alpha") as client:
        client.send("stop", {"checkpoint": checkpoint})
        return wait_for_end(client).step


def taken_up(cluster: BlockingCluster, run: str, by: str, at: int, **options: object) -> m.RunView:
    """Have a node take the run up; it must go on from step `at` and be conducted there."""
    args = {"resume": run, **({"old_lead_is_off": True} if options.pop("off", False) else {})}
    with cluster.client(by) as client:
        reply = client.send("start-run", args, **options)
        assert (reply.state, reply.step) == ("applied", at + 1), reply
        view = wait_for_step(client, at + 2).run
        assert (view.run, view.lead) == (run, by)
        return view


def stopped_at(cluster: BlockingCluster, lead: str) -> int:
    with cluster.client(lead) as client:
        client.send("stop", {})
        return wait_for_end(client).step


def all_know_the_end(cluster: BlockingCluster) -> None:
    """No rank is left, and the nodes that hosted one know that the run has ended."""
    until(lambda: not any(cluster[node].trainers for node in NODES), 20, "the trainers' end")
    for node in NODES:
        with cluster.client(node) as client:
            until(
                lambda c=client: (r := run_of(c)) is None or r.state not in m.ACTIVE_RUN_STATES,
                20,
                "the end",
            )


def refused(cluster: BlockingCluster, by: str, run: str, **options: object) -> m.CommandReply:
    with cluster.client(by) as client:
        reply = client.send("start-run", {"resume": run}, **options)
        assert reply.state == "rejected", reply
        return reply


def out_of_reach(cluster: BlockingCluster, by: str, *nodes: str) -> None:
    """Their agents are killed, and the one of `by` has noticed."""
    for node in nodes:
        cluster[node].kill()
    with cluster.client(by) as client:
        until(
            lambda: {p.node for p in client.ask(m.SnapshotRequest, 0).peers if p.state == "silent"} >= {*nodes},
            20,
            "their silence",
        )


def test_other_nodes_take_it_up_handed_over_by_a_majority_and_by_an_operator_s_word(cluster, started):
    run, config = started
    active = refused(cluster, "beta", run, node="beta")
    assert active.field == "run" and f"beta takes part in {run} (lead: alpha)" in active.reason
    with cluster.client("beta") as client:
        new = client.send("start-run", {"config": config}, node="beta")
        assert (new.state, new.reason) == ("rejected", active.reason)
    at = stopped_at(cluster, "alpha")
    assert "no run" in refused(cluster, "gamma", run, node="gamma").reason
    all_know_the_end(cluster)

    # Its lead is in touch, and hands it over; asked without a name, its lead takes it up.
    first = taken_up(cluster, run, "beta", at, node="beta")
    assert {rank.state for rank in first.ranks} == {"run"}
    at = stopped_at(cluster, "beta")
    all_know_the_end(cluster)

    # Its lead is gone, and a majority agrees; the rank there joins when it is back, and learns who leads.
    out_of_reach(cluster, "alpha", "beta")
    second = taken_up(cluster, run, "alpha", at)
    assert [rank.state for rank in second.ranks] == ["run", "lost"]
    cluster["beta"].start()
    with cluster.client("alpha") as client:
        all_take_part(client)
        texts = [event.text for event in client.ask(m.EventsRequest, limit=100).events]
    assert any(text.startswith("alpha now leads the run (term") for text in texts)
    elsewhere = [text for text in texts if "another setup" in text]  # none of the times with the same ranks
    assert elsewhere == [
        f"step {at:,} was made with another setup: the ranks are those of alpha instead of alpha, beta. The loss "
        "continues within the data type's tolerance, not bit for bit"
    ]
    at = stopped_at(cluster, "alpha")
    all_know_the_end(cluster)

    # There is no majority, and the newest checkpoint isn't within reach: each is said in one line.
    out_of_reach(cluster, "beta", "alpha", "gamma")
    newest, aside = cluster.run_paths("beta", run).checkpoints / f"step-{at}", cluster.run_paths("beta", run).logs
    newest.rename(aside / newest.name)
    reply = refused(cluster, "beta", run)
    assert f"the newest checkpoint, step-{at}, is on alpha (unreachable)" in reply.reason
    (aside / newest.name).rename(newest)
    reply = refused(cluster, "beta", run)
    assert reply.reason.startswith("1 of 3 nodes agree, but a majority is 2: alpha is unreachable")
    assert "--old-lead-is-off" in reply.reason
    third = taken_up(cluster, run, "beta", at, off=True)
    assert first.generation.term < second.generation.term < third.generation.term
    for node in ("alpha", "gamma"):
        cluster[node].start()
    with cluster.client("beta") as client:
        all_take_part(client)
        steps = [step.step for step in all_steps(client, run)]
        assert steps == list(range(1, len(steps) + 1))
    last = stopped_at(cluster, "beta")
    with cluster.client("alpha") as client:
        until(lambda: [s.step for s in all_steps(client, run)][-1] == last, 20, "alpha's copy")
