"""Another node conducts: the lead hands over, is gone for good, or comes back and finds that it leads no more."""

import contextlib
import itertools
import json
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import zmq
from tests.integration.clusters import FOREVER, NODES, Cluster, on
from tests.integration.conftest import all_steps, until, wait_for_end, wait_for_step
from tests.integration.exactness import check_ledger, worst_deviation
from tests.integration.reference import one_rank_curve
from tests.integration.test_cluster_peers import Greeter
from tests.integration.test_faults import was_lost as given_up
from tests.tui.cli_calls import started

from trainctl.protocol import messages as m

STEPS = 60
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def config(run_config) -> dict[str, Any]:
    return run_config(
        run__steps=STEPS, batch={"global": 12, "micro": 1}, data__sequence_length=64, nodes=on(*NODES),
        optimizer={"learning_rate": 5e-4, "schedule": "constant"}, group={"engine": "gloo"},
    )  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(config) -> list[m.StepCommitted]:
    """One rank's curve."""
    return one_rank_curve({**config, "nodes": on("alpha", alpha={"micro": 6})})


@pytest.fixture
def run(cluster, config) -> Iterator[str]:
    """A run over all nodes, conducted by the first, that has made some steps and is paused."""
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        wait_for_step(client, 5)
        assert client.send("pause", {}).state == "applied"
    yield begun.run
    for node in NODES:
        process = cluster[node].process
        if process is None or process.poll() is not None:
            cluster.start(node)


def promote(cluster: Cluster, node: str, through: str, *, off: bool = False) -> m.CommandReply:
    with cluster.client(through) as client:
        return client.send("promote", {"old_lead_is_off": off}, node=node, timeout_seconds=60)


def view_at(cluster: Cluster, node: str) -> m.RunView:
    with cluster.client(node) as client:
        view = client.snapshot(0).run
    assert view is not None
    return view


def power_off(cluster: Cluster, node: str) -> None:
    """All of a node's processes at once, as when its machine is gone."""
    process = cluster[node].process
    assert process is not None
    below = [p for pid in cluster[node].trainer_pids() for p in (psutil.Process(pid), *family(pid))]
    for one in [psutil.Process(process.pid), *below]:
        one.suspend()
    for one in below:
        one.send_signal(signal.SIGKILL)
    cluster[node].kill()


def family(pid: int) -> list[psutil.Process]:
    """A trainer's keeper and its reducers."""
    trainer = psutil.Process(pid)
    return [trainer.parent(), *trainer.children(recursive=True)]


def check(cluster: Cluster, run: str, lead: str, undisturbed: list[m.StepCommitted], was_lost: set[str]) -> None:
    """The run has ended at its last step on the curve of one rank, and the record of every node has all of it."""
    with cluster.client(lead) as client:
        view = wait_for_end(client)
        assert (view.state, view.step, view.lead) == ("finished", STEPS, lead), view.reason
        steps = all_steps(client, run)
    assert worst_deviation(steps, undisturbed) <= 1e-5
    with cluster.client(lead) as client:
        events = client.events(run, limit=500).events
    check_ledger(cluster, run, STEPS, was_lost | given_up(events), lead)
    for node in NODES:
        with cluster.client(node) as client:
            copied = until(
                lambda c=client: (rows := all_steps(c, run))[-1:] == steps[-1:] and rows, 20, f"{node}'s copy"
            )
            assert copied == steps


def resume(cluster: Cluster, node: str) -> None:
    with cluster.client(node) as client:
        reply = client.send("resume", {}, timeout_seconds=60)
        assert reply.state == "applied", reply


@contextlib.contextmanager
def watched(cluster: Cluster, node: str) -> Iterator[list[dict[str, Any]]]:
    """What `trainctl watch --json` says of a run, begun at one node's agent, until it says that the run has ended."""
    lines: list[dict[str, Any]] = []
    with started("watch", "--json", "--connect", cluster[node].address) as process:
        lines.append(json.loads(process.stdout.readline()))
        assert lines[0]["type"] == "run-view", lines
        yield lines
        while lines[-1]["type"] != "run-view" or lines[-1]["state"] != "finished":
            line = process.stdout.readline()
            assert line, process.stderr.read()
            lines.append(json.loads(line))
            assert "type" in lines[-1], lines[-5:]
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == ""


def check_watched(lines: list[dict[str, Any]]) -> None:
    """Each step once, in order, to the last; one that was made again is of a later generation."""
    steps = [(line["step"], tuple(line["generation"])) for line in lines if line["type"] == "step-committed"]
    assert {step for step, _ in steps} == set(range(steps[0][0], STEPS + 1))
    assert len(set(steps)) == len(steps)
    assert all(step > before or made > was for (before, was), (step, made) in itertools.pairwise(steps))


def test_the_lead_hands_over_and_gets_the_run_back_without_a_rank_lost(cluster, run, undisturbed):
    with watched(cluster, "alpha") as lines:
        hand_over(cluster, run, undisturbed)
    check_watched(lines)
    assert [line["state"] for line in lines if line["type"] == "connection"] == ["connected"]


def hand_over(cluster: Cluster, run: str, undisturbed: list[m.StepCommitted]) -> None:
    resume(cluster, "alpha")
    first = view_at(cluster, "alpha").generation.term
    for term, (node, before) in enumerate((("gamma", "alpha"), ("alpha", "gamma")), first + 1):
        reply = promote(cluster, node, through=before)
        assert (reply.state, reply.before) == ("applied", f"{before} conducts"), reply
        view = until(lambda node=node: (v := view_at(cluster, node)).lead == node and v.state == "running" and v, 30)
        assert view.generation.term == term
        assert {rank.state for rank in view.ranks} == {"run"}
        # Any agent still takes a command, and its answer comes from whoever conducts.
        with cluster.client("beta") as client:
            reply = client.send("set-lr", {"value": 5e-4, "schedule": "set"}, timeout_seconds=60)
            assert reply.state == "applied", reply
        assert promote(cluster, node, through="beta").field == "node"
    check(cluster, run, "alpha", undisturbed, set())
    with cluster.client("beta") as client:
        events = client.events(run, limit=500).events
    assert not [event.text for event in events if " is lost" in event.text]
    assert [event.verb for event in events if event.outcome == "applied"][-4:] == ["promote", "set-lr"] * 2


def test_leads_that_are_gone_are_replaced_and_follow_when_they_are_back(cluster, run, undisturbed):
    """The first by a majority; the second, when there is none left, only by the word that it is off for certain."""
    with watched(cluster, "alpha") as lines:
        lose_leads(cluster, run, undisturbed)
    check_watched(lines)


def lose_leads(cluster: Cluster, run: str, undisturbed: list[m.StepCommitted]) -> None:
    resume(cluster, "alpha")
    note = {"verb": "note", "args": {"text": "before"}, "id": "00000000-0000-4000-8000-000000000001"}
    with cluster.client("alpha") as client:
        wait_for_step(client, 10)
        asked = client.send(**note)
    power_off(cluster, "alpha")
    reply = promote(cluster, "gamma", through="beta")
    assert reply.state == "applied", reply
    view = until(lambda: (v := view_at(cluster, "gamma")).state == "running" and v, 30, "the others' going on")
    assert [rank.state for rank in view.ranks] == ["lost", "run", "run"]
    with cluster.client("gamma") as client:
        again = client.send(**note)
        assert (again.state, again.step) == (asked.state, asked.step)
        wait_for_step(client, view.step + 3)
        assert client.send("pause", {}).state == "applied"
    cluster["gamma"].kill()
    with cluster.client("beta") as client:
        until(lambda: {peer.state for peer in client.snapshot(0).peers} == {"silent"}, 20, "the silence")
    refused = promote(cluster, "beta", through="beta")
    assert (refused.state, refused.field) == ("rejected", "node")
    assert "1 of 3 nodes agree, and a majority is 2" in refused.reason and "--old-lead-is-off" in refused.reason
    assert view_at(cluster, "beta").lead == "gamma"
    assert promote(cluster, "beta", through="beta", off=True).state == "applied"
    for node in ("gamma", "alpha"):
        cluster.start(node)
    until(lambda: {view_at(cluster, node).lead for node in NODES} == {"beta"}, 30, "one lead")
    with cluster.client("beta") as client:
        until(lambda: all(rank.backend is not None for rank in client.snapshot(0).run.ranks), 60, "all trainers")
    resume(cluster, "beta")
    check(cluster, run, "beta", undisturbed, {"alpha", "gamma"})


def test_a_run_that_was_handed_over_and_not_taken_is_conducted_again(cluster, run_config):
    """Whoever claims it is gone at once; a claim by no node of the cluster is refused."""
    with cluster.client("alpha") as client, zmq.Context() as context:
        begun = client.send("start-run", {"config": run_config(run__steps=FOREVER, nodes=on("alpha", "beta"))})
        before = wait_for_step(client, 3).run
        for name, refused in (("omega", True), ("beta", False)):
            claimant = Greeter(context, cluster["alpha"].address, name * 3)
            claimant.say(m.PeerHello(link=claimant.link, lead=name, address="tcp://127.0.0.1:9"))
            claimant.hear(m.PeerWelcome)
            hosted = m.HostedRank(begun.run, 1, None, before.step, before.generation, 0, 0)
            claimant.say(
                m.PeerClaim(link=claimant.link, seq=1, run=begun.run, term=before.generation.term + 1, hosted=hosted)
            )
            consent = claimant.hear(m.PeerConsent)
            claimant.socket.close(linger=0)
            assert bool(consent.refusal) == refused, consent
        assert view_at(cluster, "alpha").lead == "beta"
        view = until(lambda: (v := view_at(cluster, "alpha")).lead == "alpha" and v.state == "running" and v, 40)
        assert view.generation.term == before.generation.term + 2
        wait_for_step(client, view.step + 3)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        last = wait_for_end(client).step
        assert [step.step for step in all_steps(client, begun.run)] == list(range(1, last + 1))


def test_who_has_no_copy_of_a_run_or_conducts_it_is_not_promoted(cluster):
    for through in ("alpha", "beta"):
        reply = promote(cluster, "beta", through)
        assert (reply.state, reply.field) == ("rejected", "node") and "no rank of an active run" in reply.reason
    reply = promote(cluster, "nowhere", "alpha")
    assert (reply.state, reply.field) == ("rejected", "node") and "no node 'nowhere'" in reply.reason
    with cluster.client("alpha") as client:
        reply = client.send("promote", {})
        assert (reply.state, reply.field, reply.reason) == ("rejected", "node", "promote needs the node that it is for")


def test_a_lead_without_a_rank_tells_how_the_run_is_that_it_has_handed_over(cluster, run_config):
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": run_config(run__steps=FOREVER, nodes=on("beta"))})
        wait_for_step(client, 3)
        assert promote(cluster, "beta", through="alpha").state == "applied"
        view = until(lambda: (v := client.snapshot(0).run).state == "running" and v, 30, "the going on")
        assert (view.run, view.lead, view.generation.term) == (begun.run, "beta", begun_term(cluster, begun.run))
        (row,) = [row for row in client.runs().runs if row.run == begun.run]
        assert (row.state, row.lead, row.nodes, row.stale) == ("running", "beta", ("beta",), False)
        # What it is asked to change is for its lead.
        assert client.send("pause", {}).state == "applied"
        assert view_at(cluster, "beta").state == "paused"
        cluster["beta"].kill()
        until(lambda: {"silent"} <= {peer.state for peer in client.snapshot(0).peers}, 20, "the silence")
        (row,) = [row for row in client.runs().runs if row.run == begun.run]
        assert (row.lead, row.stale) == ("beta", True)
        assert "beta conducts it and is out of reach" in client.snapshot(0).run.reason
        cluster.start("beta")
        until(lambda: all(peer.state == "connected" for peer in client.snapshot(0).peers), 20, "the return")
        assert client.send("stop", {"checkpoint": False}, timeout_seconds=60).state == "applied"
        until(lambda: client.snapshot(0).run.state == "stopped", 30, "the end")
    assert view_at(cluster, "beta").state == "stopped"


def begun_term(cluster: Cluster, run: str) -> int:
    """The term in which the node that has the run's rank conducts it."""
    view = view_at(cluster, "beta")
    assert view.run == run
    return view.generation.term
