"""Branches of runs: what is refused, and lineage in both records."""

from typing import Any

from tests.asking import events_of
from tests.cluster.in_process import BlockingAgent, BlockingCluster
from tests.cluster.run_files import NODE, on
from tests.cluster.waits import wait_for_end
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import RunBranched
from trainctl.protocol.record.reader import RecordReader

STEPS, FORK = 12, 6


def test_a_branch_begins_at_a_checkpoint_that_there_is_and_ends_after_it(agent: BlockingAgent, run_config: Any) -> None:
    table = {"every_steps": FORK // 2, "keep_last": 1000, "background": False}
    with agent.client() as client:
        begun = client.send("start-run", {"config": run_config(run__steps=STEPS, checkpoint=table)})
        assert begun.state == "applied", begun.reason
        parent = wait_for_end(client)
        branch = client.send("start-run", {"branch": f"{parent.run}@{FORK}"})
        assert (branch.state, branch.step) == ("applied", FORK + 1), branch.reason
        view = wait_for_end(client)
        assert view.branch == m.BranchPoint(parent.run, FORK, 12 * FORK)
        assert view.trained(12 * STEPS) == 12 * (STEPS - FORK)
        assert {run.run: run.branch for run in client.ask(m.RunsRequest).runs} == {
            parent.run: None,
            view.run: view.branch,
        }
        for run in (parent.run, view.run):
            kept = [event.data for event in events_of(client, run) if isinstance(event.data, RunBranched)]
            assert kept == [RunBranched(parent.run, FORK, view.run, NODE)]
        missing = client.send("start-run", {"branch": f"{parent.run}@{FORK + 1}"})
        assert (missing.state, missing.field) == ("rejected", "branch")
        assert missing.reason == (
            f"{parent.run} has no checkpoint of step 7 on {view.lead}; it has those of steps 3, 6, 9, 12"
        )
        over = client.send("start-run", {"branch": f"{parent.run}"})
        assert (over.state, over.field) == ("rejected", "config: run.steps")


def branches_in(cluster: BlockingCluster, node: str, run: str) -> list[RunBranched]:
    with RecordReader(cluster.run_paths(node, run)) as reader:
        events, _ = reader.events(limit=500)
    return [event.data for event in events if isinstance(event.data, RunBranched)]


def test_the_record_of_the_parents_lead_names_a_branch_that_another_node_started(
    cluster: BlockingCluster, run_config: Any
) -> None:
    table = {"checkpoint": {"at_end": True, "background": False}}
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": run_config(run__steps=FORK, nodes=on("alpha", "beta"), **table)})
        assert begun.state == "applied", begun.reason
        parent = wait_for_end(client)
    until(lambda: cluster.view("beta").state not in m.ACTIVE_RUN_STATES, what="the follower's end")
    with cluster.client("beta") as client:
        config = run_config(run__steps=FORK + 2, nodes=on("beta"), **table)
        begun = client.send("start-run", {"branch": f"{parent.run}@{FORK}", "config": config}, node="beta")
        assert begun.state == "applied", begun.reason
        branch = wait_for_end(client)
    said = RunBranched(parent.run, FORK, branch.run, "beta")
    assert branches_in(cluster, "beta", branch.run) == [said]
    until(lambda: branches_in(cluster, "alpha", parent.run) == [said], 60, "the event in the parent's record")
