"""Three ranks on three nodes as one group: commands, and agents that are killed and come back, on one run."""

import signal

import pytest
from tests.asking import newest_events, run_of
from tests.cluster.folding import check_edits, check_steps
from tests.cluster.group_commands import send_commands
from tests.cluster.in_process import BlockingCluster, in_process_cluster
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import plans_of, wait_for_step
from tests.waiting import until

from trainctl.protocol.errors import RefusedError
from trainctl.protocol.messages import EventsRequest, LogRequest, SnapshotRequest

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


@pytest.mark.parametrize("killed", NODES)
def test_killed_after_it_was_accepted_a_command_takes_effect_once_on_all_ranks(group, killed):
    with group.client("alpha") as client:
        run = run_of(client).run
        sent = client.send("resize-batch", {"micro": 1}, wait="accepted")
        group[killed].kill()
        group[killed].start()
        again = client.send("resize-batch", {"micro": 1}, id=sent.id)
        assert (sent.state in ("accepted", "applied"), again.state) == (True, "applied"), again
        wait_for_step(client, again.step + 1)
    carrying = [plan for plan in plans_of(group.run_paths("alpha", run)) if again.id in plan.commands]
    assert {plan.step for plan in carrying} == {again.step}
    (whole,) = {plan.work for plan in carrying if plan.finishes is None}
    assert [(NODES[work.rank], work.micro_batch) for work in whole] == [(node, 1) for node in NODES]


def test_the_log_of_any_rank_comes_from_any_agent(group):
    run = group.view("alpha").run
    for asked in NODES:
        with group.client(asked) as client:
            for rank, node in enumerate(NODES):
                assert client.ask(LogRequest, run, rank).text == group.run_paths(node, run).log(rank).read_text() != ""
            with pytest.raises(RefusedError, match="rank 7"):
                client.ask(LogRequest, run, 7)


@pytest.mark.tier("all")
def test_a_trainer_that_dies_comes_back_with_the_group_s_state(group):
    with group.client() as client:
        wait_for_step(client, 3)
        (trainer,) = group["gamma"].trainers
        group.call(trainer.die, -signal.SIGKILL)
        at = client.ask(
            SnapshotRequest, 0
        ).run.step  # it may have died in this one or in the next, without a row of its own
        until(lambda: group["gamma"].trainers not in ([], [trainer]), what="another trainer")
        until(lambda: {rank.state for rank in run_of(client).ranks} == {"run"}, what="the whole group")
        last = wait_for_step(client, max(at, run_of(client).step) + 3).run
        texts = [event.text for event in client.ask(EventsRequest, limit=200).events]
    assert any("gamma" in text and "was ended by signal 9" in text for text in texts), texts
    check_steps(group, last.run, 1, at - 1)
    check_steps(group, last.run, at + 2, last.step)
