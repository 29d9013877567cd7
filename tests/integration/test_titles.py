"""What `ps` shows of a cluster's processes, and that they are found, taken up again and counted under their titles."""

import os

import psutil
from tests.conftest import MARK
from tests.integration.conftest import until, wait_for_step
from tests.integration.support.clusters import NODES, Cluster, on

from trainctl.node_agent.readings.processes import ProcessMeter
from trainctl.protocol.client.blocking import BlockingClient


def test_each_process_says_who_it_is_and_a_restarted_agent_takes_its_trainer_up_again(cluster: Cluster, run_config):
    config = run_config(run__steps=1_000_000, nodes=on(*NODES[:2]), group={"first_shares": "even"})
    with cluster.client() as client:
        client.send("start-run", {"config": config}, wait="accepted")
        run = wait_for_step(client, 3, 150).run.run
        for rank, node in enumerate(NODES[:2]):
            generation = client.snapshot(0).run.generation
            roles = check_titles(cluster, run, node, rank, str(generation))
            assert roles == ["keeper", "reducer", "standby", "trainer"]
        before = cluster.trainers()
        cluster["beta"].kill()
        cluster.start("beta")
        resumed = client.snapshot(0).run.step
        wait_for_step(client, resumed + 3)
        assert cluster.trainers() == before
        kill_reducer(cluster, client)
        check_titles(cluster, run, "beta", 1, str(client.snapshot(0).run.generation))


def check_titles(cluster: Cluster, run: str, node: str, rank: int, generation: str) -> list[str]:
    """The agent and all of its rank's processes by title; gives the roles that are published of the latter."""
    agent = cluster[node].process
    assert agent is not None and shown(psutil.Process(agent.pid)) == f"trainctl: agent {node}"
    (pid,) = cluster[node].trainer_pids()
    trainer = psutil.Process(pid)
    who = f"rank {rank} of {run}"
    (server,) = trainer.children()
    assert shown(trainer) == f"trainctl: trainer {who}"
    until(lambda: shown(trainer.parent()) == f"trainctl: shim {who}", 20, "the shim's title")
    assert shown(server) == f"trainctl: fork server {who}"
    assert [shown(child) for child in server.children()] == [f"trainctl: reducer {who} {generation}"]
    meter = ProcessMeter()
    meter.find(cluster.run_paths(node, run).directory)
    return sorted(reading.role for reading in meter.read() if reading.rank == rank)


def kill_reducer(cluster: Cluster, client: BlockingClient) -> None:
    """The run goes on in a generation of its own."""
    (trainer,) = cluster["beta"].trainer_pids()
    (reducer,) = [child for child in psutil.Process(trainer).children(recursive=True) if "reducer" in shown(child)]
    before = client.snapshot(0).run
    reducer.kill()
    until(lambda: client.snapshot(0).run.generation > before.generation, 30, "another generation")
    wait_for_step(client, client.snapshot(0).run.step + 2)


def shown(process: psutil.Process | None) -> str:
    """Its title; the environment that it was started with must be readable."""
    assert process is not None
    assert process.environ()[MARK] == os.environ[MARK]
    return " ".join(process.cmdline()).strip()
