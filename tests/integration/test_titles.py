"""What `ps` shows of a cluster's processes, and that they are found, taken up again and counted under their titles."""

import contextlib
import os

import psutil
from tests.asking import run_of
from tests.cluster.run_files import NODES, RING, on_mlx
from tests.cluster.waits import wait_for_step
from tests.conftest import MARK
from tests.integration.support.clusters import Cluster
from tests.waiting import until

from trainctl.node_agent.readings.processes import ProcessMeter
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient


def test_each_process_says_who_it_is_and_a_restarted_agent_takes_its_trainer_up_again(cluster: Cluster, run_config):
    config = run_config(run__steps=1_000_000, nodes=on_mlx(*NODES[:2]), group={"first_shares": "even", **RING})
    with cluster.client() as client:
        client.send("start-run", {"config": config}, wait="accepted")
        run = wait_for_step(client, 3, 150).run.run
        for rank, node in enumerate(NODES[:2]):
            generation = run_of(client).generation
            roles = check_titles(cluster, run, node, rank, str(generation))
            assert roles == ["keeper", "reducer", "standby", "trainer"]
        before = cluster.trainers()
        cluster["beta"].kill()
        cluster.start("beta")
        resumed = run_of(client).step
        wait_for_step(client, resumed + 3)
        assert cluster.trainers() == before
        kill_reducer(cluster, client)
        check_titles(cluster, run, "beta", 1, str(run_of(client).generation))


def check_titles(cluster: Cluster, run: str, node: str, rank: int, generation: str) -> list[str]:
    """The agent and all of its rank's processes by title; gives the roles that are published of the latter."""
    agent = cluster[node].process
    assert agent is not None and shown(psutil.Process(agent.pid)) == f"trainctl: agent {node}"
    (pid,) = cluster[node].trainer_pids()
    trainer = psutil.Process(pid)
    who = f"rank {rank} of {run}"
    (server,) = trainer.children()
    assert shown(trainer) == f"trainctl: trainer {who}"
    until(lambda: shown(trainer.parent()) == f"trainctl: trainer parent {who}", 20, "its parent's title")
    assert shown(server) == f"trainctl: fork server {who}"
    wanted = [f"trainctl: reducer {who} {generation}"]
    until(lambda: [title for _, title in reducers(server)] == wanted, 20, f"{wanted} alone", lambda: reducers(server))
    meter = ProcessMeter()
    meter.find(cluster.run_paths(node, run).directory)
    return sorted(reading.role for reading in meter.read() if reading.rank == rank)


def kill_reducer(cluster: Cluster, client: BlockingClient) -> None:
    """The run goes on in a generation of its own."""
    (trainer,) = cluster["beta"].trainer_pids()
    (server,) = psutil.Process(trainer).children()

    def find() -> tuple[m.Generation, int] | None:
        """The one of the generation that trains: after the agent's return, one of an older may still be there."""
        run = run_of(client)
        found = [pid for pid, title in reducers(server) if title.endswith(f" {run.generation}")]
        return (run.generation, found[0]) if run.state == "running" and found else None

    before, pid = until(find, what="the reducer of the run's generation")
    psutil.Process(pid).kill()
    until(lambda: run_of(client).generation > before, 30, "another generation")
    wait_for_step(client, run_of(client).step + 2)


def reducers(server: psutil.Process) -> list[tuple[int, str]]:
    """The live processes that a fork server has made, each with its title."""
    found = []
    for child in server.children():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile, or has not been reaped yet
            found.append((child.pid, shown(child)))
    return found


def shown(process: psutil.Process | None) -> str:
    """Its title; the environment that it was started with must be readable."""
    assert process is not None
    assert process.environ()[MARK] == os.environ[MARK]
    return " ".join(process.cmdline()).strip()
