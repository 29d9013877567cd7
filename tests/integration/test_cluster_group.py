"""Three ranks on three nodes as one group: commands, and agents that are killed and come back, on one live run."""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from tests.asking import newest_events, run_of
from tests.cluster.folding import check_edits, check_steps
from tests.cluster.group_commands import SAMPLES, send_commands
from tests.cluster.run_files import FOREVER, NODES, on
from tests.cluster.waits import plans_of, wait_for_end, wait_for_step
from tests.integration.conftest import keep_processes
from tests.integration.support.clusters import Cluster, have_back
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.trainers.rank_ports import newest_reports
from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.client import Client, Connection
from trainctl.protocol.client.cluster import attach_cluster
from trainctl.protocol.record import log_format
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.state.source import ClusterSource


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


async def test_commands_are_applied_at_one_step_on_all_ranks_or_refused(group, group_config):
    cluster, run = group

    def client(node: str) -> Client:
        return Client(cluster[node].address, by="tester", timeout_seconds=HANG_SECONDS)

    await send_commands(cluster, client, run, group_config, batches=16)


@pytest.mark.parametrize("killed", NODES)
def test_killed_between_accept_and_apply_a_command_takes_effect_once_on_all_ranks(group, killed):
    """With and without an agent that stands still, so that the step in progress can't end before the kill."""
    cluster, run = group
    for stands, verb, args in (
        (True, "resize-batch", {"micro": 1 + NODES.index(killed) % 2}),
        (False, "rebalance", {"shares": {"alpha": 3 + NODES.index(killed), "beta": 4}}),
    ):
        still = cluster["beta" if killed == "alpha" else killed].process
        with cluster.client("alpha") as client:
            if stands:
                still.send_signal(signal.SIGSTOP)
            try:
                sent = client.send(verb, args, wait="accepted")
                cluster[killed].kill()
            finally:
                if still.poll() is None:
                    still.send_signal(signal.SIGCONT)
            with waiting(cluster["alpha"].process):
                cluster.start(killed)
            again = client.send(verb, args, id=sent.id)
            assert (sent.state in ("accepted", "applied"), again.state) == (True, "applied"), again
            wait_for_step(client, again.step + 1)
        check_effect(cluster, run, again, args)


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


def check_effect(cluster: Cluster, run: str, reply: m.CommandReply, args: dict) -> None:
    """The one step that the command was applied at, and that one's rows, have what it asked for. A row may come late:
    what a rank said to an agent that was killed it says again to the next one."""
    plans = plans_of(cluster.run_paths("alpha", run))
    carrying = [plan for plan in plans if reply.id in plan.commands]
    was_finished = any(plan.step == reply.step and plan.finishes is not None for plan in plans)
    assert {plan.step for plan in carrying} == {reply.step}
    (whole,) = {plan.work for plan in carrying if plan.finishes is None}
    assert [NODES[work.rank] for work in whole] == list(NODES)
    with RecordReader(cluster.run_paths("alpha", run)) as reader:
        until(lambda: len(reader.rank_steps(reply.step)) == len(NODES), what="all ranks' rows of the step")
        rows = {row.node: row for row in reader.rank_steps(reply.step)}
    if "micro" in args:
        done = {row.micro_batch for row in rows.values()}
        assert {work.micro_batch for work in whole} == {args["micro"]}
        # The rest of a batch that was half done may be smaller than a micro-batch.
        assert done == {args["micro"]} or (was_finished and max(done) <= args["micro"])
        return
    planned = {NODES[work.rank]: sum(piece.count for piece in work.ranges) for work in whole}
    assert planned.items() >= args["shares"].items() and sum(planned.values()) == SAMPLES
    if all(plan.finishes is None for plan in carrying):
        assert {node: row.samples for node, row in rows.items()} == planned


# ---------------------------------------------------------------- agents that are killed


def test_agents_killed_again_and_again_cost_no_step_and_no_trainer(group):
    cluster, run = group
    chance, trainers = random.Random(7), cluster.trainers()
    assert [len(pids) for pids in trainers.values()] == [1, 1, 1]
    with cluster.client("alpha") as client:
        before = run_of(client)
        for node in ("beta", "alpha", "gamma"):
            time.sleep(chance.uniform(0.0, 0.2))
            cluster[node].kill()
            time.sleep(chance.uniform(0.0, 0.2))
            cluster.start(node)
            state = until(lambda: run_of(client), what="the lead's word")
            wait_for_step(client, state.step + 5)
        after = run_of(client)
        events = newest_events(client)
    assert cluster.trainers() == trainers
    assert after.generation > before.generation and after.state == "running"
    assert {event.by for event in events if event.kind == "agent"} >= {"beta", "gamma"}
    with cluster.client("beta") as follower:
        seen = run_of(follower)
    assert (seen.run, seen.lead, seen.state) == (run, "alpha", "running")


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


async def test_each_rank_s_log_and_processes_are_seen_through_any_agent(group):
    cluster, run = group
    processes: dict[str, set[str]] = {}
    views: dict[str, m.NodeView] = {}
    async with (
        asyncio.timeout(HANG_SECONDS),
        ClusterSource(cluster["gamma"].address, by="anna") as source,
        contextlib.aclosing(source.follow(0)) as items,
    ):
        async for node, item in items:
            if isinstance(item, m.HostReading):
                processes[item.node] = {process.role for process in item.processes}
            elif isinstance(item, m.NodeView):
                views[node] = item
            if len(processes) == 3 and all({"agent", "keeper", "trainer"} <= roles for roles in processes.values()):
                break
        logs = [await source.log(node, run, rank, -65_536, 65_536) for rank, node in enumerate(NODES)]
    assert {view.version for view in views.values()} == {views["beta"].version} and views.keys() == {"beta", "gamma"}
    for rank, part in enumerate(logs):
        said = [log_format.read(line) for line in part.text.splitlines()]
        assert part.rank == rank and [line.level for line in said if line.text.startswith("ready: ")] != []
