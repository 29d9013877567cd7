"""Three ranks on three nodes as one group: commands, and agents that are killed and come back, on one run."""

import pytest
from tests.asking import newest_events, run_of
from tests.cluster.folding import check_edits, check_steps
from tests.cluster.group_commands import send_commands
from tests.cluster.in_process import BlockingCluster, in_process_cluster
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import wait_for_step
from tests.waiting import until

from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages import LogRequest, SnapshotRequest

EVEN = {"engine": "gloo", "first_shares": "even"}
"""`check_edits` begins from even shares."""


@pytest.fixture
def config(run_config) -> dict:
    return run_config(run__steps=FOREVER, batch={"global": 12, "micro": 2}, nodes=on(*NODES), group=EVEN)


@pytest.fixture
def group(cluster, config) -> BlockingCluster:
    """A cluster with a run over all nodes that goes on and on."""
    with cluster.client() as client:
        started = client.send("start-run", {"config": config})
        assert started.state == "applied", started.reason
    return cluster


async def test_commands_are_applied_at_one_step_on_all_ranks_or_refused(config, tmp_path):
    async with in_process_cluster(tmp_path) as cluster, cluster["alpha"].client() as client:
        begun = await client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        await send_commands(cluster, lambda node: cluster[node].client(), begun.run, config, batches=32)
        last = (await client.ask(SnapshotRequest, 0)).run.step
        await client.send("stop", {})
    check_steps(cluster, begun.run, 1, last)
    check_edits(cluster, begun.run, config)


def test_agents_killed_again_and_again_cost_no_step_and_no_trainer(group, config):
    trainers = {node: group[node].trainers for node in NODES}
    with group.client() as client:
        before = run_of(client)
        for node in ("beta", "alpha", "gamma"):
            group[node].kill()
            group[node].start()
            state = until(lambda: run_of(client), what="the lead's word")
            wait_for_step(client, state.step + 5)
        after = run_of(client)
        events = newest_events(client)
    assert {node: group[node].trainers for node in NODES} == trainers
    assert after.generation > before.generation and after.state == "running"
    assert {event.by for event in events if event.kind == "agent"} >= {"beta", "gamma"}
    (waited,) = (event for event in events if "waited for an agent" in event.text)
    assert (
        waited.text == f"after step {waited.step:,} the ranks waited for an agent to plan the next one, and go on now"
    )
    seen = group.view("beta")
    assert (seen.run, seen.lead, seen.state) == (before.run, "alpha", "running")
    check_steps(group, before.run, 1, after.step)


def test_the_log_of_any_rank_comes_from_any_agent(group):
    run = group.view("alpha").run
    for asked in NODES:
        with group.client(asked) as client:
            for rank, node in enumerate(NODES):
                assert client.ask(LogRequest, run, rank).text == group.run_paths(node, run).log(rank).read_text() != ""
            with pytest.raises(RefusedError, match="rank 7"):
                client.ask(LogRequest, run, 7)
