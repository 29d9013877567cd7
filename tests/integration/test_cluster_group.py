"""Three ranks on three nodes as one group: what clients see of a lost node, and whom `ps` shows."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest
from tests.asking import run_of
from tests.cluster.folding import check_edits, check_steps
from tests.cluster.group_commands import SAMPLES
from tests.cluster.run_files import FOREVER, NODES, RING, on, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.conftest import MARK
from tests.integration.conftest import keep_processes
from tests.integration.support.clusters import Cluster, have_back
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.readings.host import ProcessMeter
from trainctl.node_agent.trainers.rank_ports import newest_reports
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import Connection
from trainctl.protocol.client.cluster import attach_cluster
from trainctl.protocol.record.reader import RecordReader


@pytest.fixture(scope="module")
def group_config(run_config) -> dict:
    even = {"first_shares": "even"}  # check_edits begins from them
    return run_config(run__steps=FOREVER, batch__global=SAMPLES, nodes=on(*NODES), batch__micro=2, group=even)


@pytest.fixture(scope="module")
def group_run(three_agents, group_config) -> Iterator[str]:
    """A run over all three nodes that goes on and on."""
    three_agents.in_touch()
    with three_agents.client() as client:
        started = client.send("start-run", {"config": group_config})
        assert started.state == "applied", started.reason
    keep_processes()
    yield started.run
    with three_agents.client() as client:
        client.send("stop", {"checkpoint": False})
        assert wait_for_end(client).state == "stopped"
    three_agents.settle()


@pytest.fixture
def group(three_agents, group_run, group_config) -> Iterator[tuple[Cluster, str]]:
    """The cluster and the run, which a test leaves running and whole: each step has all of its samples, on all ranks as
    its plan has it, and each plan is what the edits up to it come to."""
    keep_processes()
    three_agents.restart_agents()
    with three_agents.client() as client:
        wait_until_whole(client)
        first = run_of(client).step
        yield three_agents, group_run
        last = run_of(client).step
        wait_for_step(client, last + 3)
        wait_until_whole(client)
    check_steps(three_agents, group_run, first + 1, last)
    check_edits(three_agents, group_run, group_config)
    keep_processes()


def wait_until_whole(client: BlockingClient) -> None:
    """Until every rank takes part, or has been drained."""
    until(
        lambda: {rank.state for rank in run_of(client).ranks} <= {"run", "drained"},
        what="a whole group",
        progress=lambda: [(rank.node, rank.state, rank.backend) for rank in run_of(client).ranks],
    )


# ---------------------------------------------------------------- commands


@contextlib.contextmanager
def waiting(lead: "subprocess.Popen[str]") -> Iterator[None]:
    """The lead doesn't count the seconds in which an agent is started: on a busy machine its rank would be lost."""
    if lead.poll() is None:
        lead.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        if lead.poll() is None:
            lead.send_signal(signal.SIGCONT)


# ---------------------------------------------------------------- agents that are killed


def test_a_step_that_a_node_made_before_it_died_has_its_row_once_the_node_is_back(group):
    """Its agent never read the report, and its trainer, which had kept it in a record of its own, is gone as well."""
    cluster, run = group
    gamma, paths = cluster["gamma"], cluster.run_paths("gamma", run)
    with cluster.client("alpha") as client, RecordReader(cluster.run_paths("alpha", run)) as reader:

        def unread_or_lost() -> int | None:
            states = {rank.node: rank.state for rank in run_of(client).ranks}
            return -1 if states["gamma"] == "lost" else unread_step(reader, newest_reports(paths.rank_record(2)))

        for _ in range(10):
            gamma.process.send_signal(signal.SIGSTOP)
            made = until(unread_or_lost, what="an unread step")
            if made > 0:
                break
            # It was stopped before its trainer had the next plan.
            gamma.process.send_signal(signal.SIGCONT)
            have_back(client, "gamma")
        assert made > 0
        (pid,) = gamma.trainer_pids()
        os.kill(pid, signal.SIGKILL)
        gamma.kill()
        cluster.start("gamma")
        until(lambda: len(reader.rank_steps(made)) == len(NODES), what="gamma's row of the step")
        have_back(client, "gamma")


def unread_step(reader: RecordReader, reports: list[m.Report]) -> int | None:
    """The newest step that rank 2 has kept a report of, if the lead has the step and not that report."""
    step = reports[-1].step if reports else 0
    return step if {part.rank for part in reader.rank_steps(step)} == {0, 1} else None


# ---------------------------------------------------------------- what clients see


async def test_who_follows_the_cluster_through_any_agent_sees_the_lead_in_full_and_every_machine(group):
    """One agent stalls for a while: the line to it, the lead's word of its rank and the steps all show it."""
    cluster, run = group
    seen: dict[str, set[str]] = {node: set() for node in ("", *NODES)}
    steps, gamma, whys, stood = [], [], [], 0
    stalled = cluster["gamma"].process
    try:
        async with (
            asyncio.timeout(HANG_SECONDS),
            contextlib.aclosing(attach_cluster(cluster["beta"].address, 20)) as items,
        ):
            async for node, item in items:
                seen[node].add(type(item).__name__)
                if isinstance(item, m.Snapshot):
                    assert (node, item.run.run, len(item.peers)) == ("alpha", run, 2)
                elif isinstance(item, m.StepCommitted):
                    steps.append(item.step)
                elif isinstance(item, m.RunView):
                    whys += [rank.why for rank in item.ranks if rank.state == "lost"]
                elif isinstance(item, Connection) and node == "gamma":
                    gamma.append(item.state)
                met = seen["beta"] & seen["gamma"] >= {"NodeView", "HostReading", "Heartbeat", "Connection"}
                if "stalled" not in gamma and gamma[-1:] == ["connected"] and len(steps) > 5 and met:
                    stalled.send_signal(signal.SIGSTOP)
                    gamma = ["stalled"]
                elif gamma[:1] == ["stalled"] and "silent" in gamma and whys:
                    stalled.send_signal(signal.SIGCONT)
                    if gamma[-1] == "connected" and steps[-1] > stood + 5:
                        break
                else:
                    stood = steps[-1] if steps else 0
    finally:
        stalled.send_signal(signal.SIGCONT)
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert any("gamma's agent" in why for why in whys), whys
    assert seen["alpha"] >= {"Snapshot", "StepCommitted", "RankStep", "HostReading", "Heartbeat", "Connection"}
    for node in ("beta", "gamma"):  # which may report alerts of their own
        assert seen[node] - {"Alerts"} == {"NodeView", "HostReading", "Heartbeat", "Connection"}


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
