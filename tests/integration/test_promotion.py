"""Another node conducts: the lead hands over, is gone, and comes back and finds that it leads no more.

Three unlike ranks, edited, with a reducer killed and under four leads one after another, train as one rank does.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import psutil
import pytest
from tests.asking import events_of, run_of
from tests.cluster.folding import check_edits, check_steps
from tests.cluster.run_files import NODES, on
from tests.cluster.waits import all_steps, newest_step, promote, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.integration.support.exactness import check_ledger, worst_deviation
from tests.integration.support.fault_table import was_lost as given_up
from tests.integration.support.reference import one_rank_curve
from tests.integration.support.transfer import check_watched, power_off, resume, steps_of, view_at, watched
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.record.reader import RecordReader

STEPS = 120
SHARES = {"alpha": {"share": 6}, "beta": {"share": 4}, "gamma": {"share": 2}}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def config(run_config) -> dict[str, Any]:
    """Samples long enough that some commands end before the run does."""
    return run_config(
        run__steps=STEPS, batch={"global": 12, "micro": 1}, data__sequence_length=64, nodes=on(*NODES, **SHARES),
        optimizer__learning_rate=5e-4, group={"engine": "gloo"},
    )  # fmt: skip


@pytest.fixture
def run(cluster, config) -> Iterator[str]:
    """A run over all nodes, conducted by the first, that is paused after its first steps."""
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        assert client.send("pause", {}).state == "applied"
    yield begun.run
    for node in NODES:
        process = cluster[node].process
        if process is None or process.poll() is not None:
            cluster.start(node)


def test_three_ranks_edited_and_under_one_lead_after_another_train_as_one_does(cluster, run, config):
    """The rank that hosts the lead changes with and without that node's consent, and no client loses sight of it."""
    with watched(cluster, "alpha") as lines:
        edit_and_kill_a_reducer(cluster, run, config)
        hand_over(cluster, run)
        at = paused(cluster, "alpha").step
        until(lambda: (told := steps_of(lines)) and told[-1][0] == at, 20, "the steps that are watched")
        assert [line["state"] for line in lines if line["type"] == "connection"] == ["connected"]
        lose_the_lead(cluster)
        check(cluster, run, "gamma", one_rank_curve({**config, "nodes": on("alpha", alpha={"micro": 6})}))
    check_watched(lines, STEPS)


def paused(cluster: Cluster, lead: str) -> m.RunView:
    with cluster.client(lead) as client:
        assert client.send("pause", {}).state == "applied"
    return view_at(cluster, lead)


def edit_and_kill_a_reducer(cluster: Cluster, run: str, config: dict[str, Any]) -> None:
    with cluster.client("alpha") as client:
        resume(cluster, "alpha")
        for verb, args, node in (
            ("rebalance", {"shares": {"alpha": 3, "beta": 4, "gamma": 5}}, None),
            ("resize-batch", {"micro": 3}, "gamma"),
        ):
            reply = client.send(verb, args, node=node)
            assert reply.state == "applied", reply
        kill_active_reducer(cluster, client)
    last = paused(cluster, "alpha")
    assert last.generation > m.Generation(1, 1)
    with RecordReader(cluster.run_paths("alpha", run)) as reader:
        until(lambda: len(reader.rank_steps(last.step)) == len(NODES), 20, "the last reports")
    check_steps(cluster, run, 1, last.step)
    check_edits(cluster, run, config)


def kill_active_reducer(cluster: Cluster, client: BlockingClient) -> None:
    """One that is in the group, of a node that doesn't conduct; the run goes on in another generation."""
    (trainer,) = cluster["beta"].trainer_pids()
    before = run_of(client)
    assert before.state == "running", before
    (active,) = [child for child in psutil.Process(trainer).children(recursive=True) if is_joined(child)]
    active.kill()
    after = until(
        lambda: (v := run_of(client)).generation > before.generation and v,
        30,
        "another generation",
    )
    assert after.state != "failed", after.reason
    wait_for_step(client, after.step + 2)  # a rank that was given another's state has no row of that step


def is_joined(process: psutil.Process) -> bool:
    """Return whether it is a reducer that is connected to others; what makes the next one is not."""
    with contextlib.suppress(psutil.Error):
        return any(line.status == psutil.CONN_ESTABLISHED for line in process.net_connections("tcp"))
    return False


def hand_over(cluster: Cluster, run: str) -> None:
    """To another node and back, and no rank is lost by it."""
    resume(cluster, "alpha")
    term = view_at(cluster, "alpha").generation.term
    for micro, (node, before) in enumerate((("gamma", "alpha"), ("alpha", "gamma")), 1):
        reply = promote(cluster, node, through=before)
        assert (reply.state, reply.before) == ("applied", f"{before} leads"), reply
        view = until(lambda node=node: (v := view_at(cluster, node)).lead == node and v.state == "running" and v, 30)
        assert view.generation.term > term
        term = view.generation.term
        assert {rank.state for rank in view.ranks} == {"run"}, [event.text for event in told(cluster, node, run)]
        # Any agent still takes a command, and its answer comes from the conducting node.
        with cluster.client("beta") as client:
            reply = client.send("resize-batch", {"micro": micro})
            assert reply.state == "applied", reply
        assert promote(cluster, node, through="beta").field == "node"
    wanted = ["promote", "resize-batch"] * 2
    with cluster.client("beta") as client:
        events = until(lambda: (e := events_of(client, run)) and verbs_of(e)[-4:] == wanted and e, 20)
    assert not [event.text for event in events if " is lost" in event.text]


def told(cluster: Cluster, node: str, run: str) -> Sequence[m.Event]:
    with cluster.client(node) as client:
        return client.ask(m.EventsRequest, run, limit=30, newest=True).events


def verbs_of(events: Sequence[m.Event]) -> list[str]:
    return [event.verb for event in events if event.outcome == "applied"]


def without_alpha(view: m.RunView) -> m.RunView | None:
    """The view, if the run goes on without the first rank alone. On a busy machine another one may be away at first."""
    goes_on = view.state == "running" and [rank.state for rank in view.ranks] == ["lost", "run", "run"]
    return view if goes_on else None


def lose_the_lead(cluster: Cluster) -> None:
    """It is replaced by a majority, and follows when it is back; what it applied isn't applied again."""
    resume(cluster, "alpha")
    note = {"verb": "note", "args": {"text": "before"}, "id": "00000000-0000-4000-8000-000000000001"}
    with cluster.client("alpha") as client:
        wait_for_step(client, view_at(cluster, "alpha").step + 3)
        asked = client.send(**note)
    power_off(cluster, "alpha")
    reply = promote(cluster, "gamma", through="beta")
    assert reply.state == "applied", reply
    view = until(lambda: without_alpha(view_at(cluster, "gamma")), 60, "the others' going on")
    with cluster.client("gamma") as client:
        again = client.send(**note)
        assert (again.state, again.step) == (asked.state, asked.step)
        wait_for_step(client, view.step + 3)
        assert client.send("pause", {}).state == "applied"
        cluster.start("alpha")
        until(lambda: {view_at(cluster, node).lead for node in NODES} == {"gamma"}, 30, "one lead")
        until(lambda: all(rank.backend is not None for rank in run_of(client).ranks), 60, "all trainers")
    resume(cluster, "gamma")


def test_a_run_whose_lead_stays_dead_is_resumed_elsewhere_from_its_last_step(cluster, run_config):
    """Nobody promotes: the other node's trainer writes a checkpoint before it is ended."""
    nodes = on("alpha", "beta", alpha={"share": 6}, beta={"share": 6})
    config = run_config(run__steps=100_000, run__orphan_seconds=4, batch={"global": 12, "micro": 6}, nodes=nodes)
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        at = wait_for_step(client, 20).run.step
    power_off(cluster, "alpha")
    with cluster.client("beta") as client:
        until(lambda: not cluster["beta"].trainer_pids(), 60, "the end of the trainer that is led by none")
        step = newest_step(cluster, "beta", begun.run)
        assert step >= at
        again = {"resume": begun.run, "old_lead_is_off": True}
        until(lambda: client.send("start-run", again).state == "applied", 30, "the run taken up")
        wait_for_step(client, step + 3)
        assert any(event.text.startswith(f"resumed from step {step:,}") for event in events_of(client, begun.run))
    cluster.start("alpha")


def check(cluster: Cluster, run: str, lead: str, undisturbed: list[m.StepCommitted]) -> None:
    """The run has ended at its last step on the curve of one rank, and the record of every node has all of it."""
    with cluster.client(lead) as client:
        view = wait_for_end(client)
        assert (view.state, view.step, view.lead) == ("finished", STEPS, lead), view.reason
        steps = all_steps(client, run)
    assert worst_deviation(steps, undisturbed) <= 1e-5
    with cluster.client(lead) as client:
        events = events_of(client, run)
    check_ledger(cluster, run, STEPS, {"alpha"} | given_up(events), lead)
    for node in NODES:
        with cluster.client(node) as client:
            copied = until(
                lambda c=client: (rows := all_steps(c, run))[-1:] == steps[-1:] and rows, 20, f"{node}'s copy"
            )
            assert copied == steps
