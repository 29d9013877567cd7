"""Three ranks on three nodes as one group: commands, and agents that are killed and come back, on one live run."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest
from tests.integration.clusters import FOREVER, NODES, Cluster, keep_processes, on, plans_of
from tests.integration.conftest import until, wait_for_end, wait_for_step

from trainctl.protocol import messages as m
from trainctl.protocol.client import Client, Connection
from trainctl.protocol.cluster_client import attach_cluster
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.reader import RecordReader

SAMPLES = 12


@pytest.fixture(scope="module")
def group_run(three_agents, run_config) -> Iterator[str]:
    """A run over all three nodes that goes on and on."""
    three_agents.in_touch()
    config = run_config(run__steps=FOREVER, batch__global=SAMPLES, nodes=on(*NODES), batch__micro=2)
    with three_agents.client() as client:
        started = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert started.state == "applied", started.reason
        keep_processes()
        yield started.run
        client.send("stop", {"checkpoint": False})
        assert wait_for_end(client).state == "stopped"
    three_agents.settle()


@pytest.fixture
def group(three_agents, group_run) -> Iterator[tuple[Cluster, str]]:
    """The cluster and the run, which a test leaves running and whole: each step has all of its samples, on all ranks as
    its plan has it."""
    keep_processes()
    with three_agents.client() as client:
        first = client.snapshot(0).run.step
        yield three_agents, group_run
        last = client.snapshot(0).run.step
        wait_for_step(client, last + 3)
    check_steps(three_agents, group_run, first + 1, last)
    keep_processes()


def check_steps(cluster: Cluster, run: str, first: int, last: int) -> None:
    """Whether every rank did every step as its plan has it, by the lead's journal and rows."""
    plans = {plan.step: plan for plan in plans_of(cluster.run_paths("alpha", run)) if plan.kind == "train"}
    with RecordReader(cluster.run_paths("alpha", run)) as reader:
        steps, _ = reader.steps(first - 1, last - first + 1)
        assert [step.step for step in steps] == list(range(first, last + 1))
        for step in steps:
            plan, rows = plans[step.step], {row.rank: row for row in reader.rank_steps(step.step)}
            assert set(rows) == {work.rank for work in plan.work}, step.step
            assert sum(row.samples for row in rows.values()) == plan.global_batch == step.global_batch, step.step
            assert (plan.learning_rate, plan.cursor + plan.global_batch) == (step.learning_rate, step.cursor)
            for work in plan.work if plan.finishes is None else ():
                assert rows[work.rank].micro_batch == work.micro_batch
                assert rows[work.rank].samples == sum(piece.count for piece in work.ranges)


# ---------------------------------------------------------------- commands


def random_command(chance: random.Random) -> tuple[str, dict, str | None]:
    """One that is mostly sensible: about a fifth are wrong in a way that only the agent, or anyone, can tell."""
    pick = chance.random()
    if pick < 0.3:
        node = chance.choice([None, *NODES, "nowhere"])
        return "resize-batch", {"micro": chance.choice([0, 1, 1, 2, 2, 3, 99])}, node
    if pick < 0.55:
        shares = chance.choice(
            [{"alpha": 6, "beta": 3, "gamma": 3}, {"alpha": 4, "beta": 4, "gamma": 4}, {"beta": "50%"},
             {"alpha": 99, "beta": 1, "gamma": 1}, {"alpha": 2, "beta": 8, "gamma": 2}, {"nowhere": 3}]
        )  # fmt: skip
        return "rebalance", {"shares": shares}, None
    if pick < 0.75:
        value = chance.choice([1e-4, 1e-3, 3e-3, -1.0, 5e-3])
        return "set-lr", {"value": value, "schedule": chance.choice(["set", "scale"])}, None
    if pick < 0.82:
        return "set-global-batch", {"value": chance.choice([SAMPLES, 18, 2])}, None
    if pick < 0.93:
        return "note", {"text": chance.choice(["a note", "another", ""])}, None
    if pick < 0.96:
        return "evaluate", {}, None
    if pick < 0.98:
        return "checkpoint", {}, None
    return chance.choice([("unheard-of", {}, None), ("drain", {}, None), ("note", {}, None)])


async def test_two_hundred_commands_are_applied_at_one_step_on_all_ranks_or_refused(group):
    cluster, run = group
    chance, replies = random.Random(11), []
    async with Client(cluster["alpha"].address, by="tester", timeout_seconds=30) as client:
        while len(replies) < 200:  # four at a time, through any agent of the cluster
            asked = [random_command(chance) for _ in range(4)]
            sent = [client.send(verb, args, node=node, timeout_seconds=120) for verb, args, node in asked]
            replies += zip(asked, await asyncio.gather(*sent), strict=True)
        await client.send("set-global-batch", {"value": SAMPLES})
        await client.send("rebalance", {"shares": dict.fromkeys(NODES, SAMPLES // len(NODES))})
    applied = [(asked, reply) for asked, reply in replies if reply.state == "applied"]
    refused = [(asked, reply) for asked, reply in replies if reply.state != "applied"]
    assert len(applied) >= 120
    for asked, reply in refused:
        assert (reply.state in ("rejected", "failed"), bool(reply.reason)) == (True, True), (asked, reply)
    check_commands(cluster, run, applied)


def check_commands(cluster: Cluster, run: str, applied: list) -> None:
    """Each edit is carried by the plans of the one step that it names; alone at its step, its value stands there."""
    carried: dict[str, set[int]] = {}
    plans = {}
    for plan in plans_of(cluster.run_paths("alpha", run)):
        for id in plan.commands:
            carried.setdefault(id, set()).add(plan.step)
        if plan.kind == "train":
            plans[plan.step] = plan
    edits = [(asked, reply) for asked, reply in applied if asked[0] not in ("note", "evaluate", "checkpoint")]
    crowd = Counter(reply.step for _, reply in edits)
    checked = 0
    for (verb, args, node), reply in edits:
        assert carried[reply.id] == {reply.step}
        if crowd[reply.step] > 1:
            continue
        checked += 1
        plan = plans[reply.step]
        if verb == "resize-batch":
            micros = {NODES[work.rank]: work.micro_batch for work in plan.work}
            assert all(micros[name] == args["micro"] for name in ((node,) if node else NODES))
        elif verb == "rebalance" and plan.finishes is None:
            samples = {NODES[work.rank]: sum(piece.count for piece in work.ranges) for work in plan.work}
            wanted = {name: count for name, count in args["shares"].items() if isinstance(count, int)}
            assert samples.items() >= wanted.items()
        elif verb == "set-global-batch":
            assert plan.global_batch == args["value"]
        elif verb == "set-lr":
            assert plan.learning_rate == pytest.approx(args["value"], rel=1e-6)
    assert checked >= 5


def test_killed_between_accept_and_apply_a_command_takes_effect_once_on_all_ranks(group):
    cluster, run = group
    lead = cluster["alpha"]
    with cluster.client("alpha", timeout_seconds=60) as client:
        for micro in (1, 2):
            sent = client.send("resize-batch", {"micro": micro}, wait="accepted")
            lead.kill()
            cluster.start("alpha")
            again = client.send("resize-batch", {"micro": micro}, id=sent.id, timeout_seconds=120)
            assert again.state == "applied", again
            wait_for_step(client, again.step + 1)
            with RecordReader(cluster.run_paths("alpha", run)) as reader:
                assert {row.micro_batch for row in reader.rank_steps(again.step)} == {micro}
            carrying = [plan for plan in plans_of(cluster.run_paths("alpha", run)) if sent.id in plan.commands]
            assert {plan.step for plan in carrying} == {again.step}
            assert all(work.micro_batch == micro for plan in carrying for work in plan.work)


# ---------------------------------------------------------------- agents that are killed


def test_agents_killed_again_and_again_cost_no_step_and_no_trainer(group):
    cluster, run = group
    chance, trainers = random.Random(7), cluster.trainers()
    assert [len(pids) for pids in trainers.values()] == [1, 1, 1]
    with cluster.client("alpha") as client:
        before = client.snapshot(0).run
        for node in ("beta", "alpha", "gamma"):
            time.sleep(chance.uniform(0.0, 0.2))
            cluster[node].kill()
            time.sleep(chance.uniform(0.0, 0.2))
            cluster.start(node)
            state = until(lambda: client.snapshot(0).run, what="the lead's word")
            wait_for_step(client, state.step + 5)
        after = client.snapshot(0).run
        events = client.events(newest=True).events
    assert cluster.trainers() == trainers
    assert after.generation > before.generation and after.state == "running"
    assert {event.by for event in events if event.kind == "agent"} >= {"beta", "gamma"}
    with cluster.client("beta") as follower:
        seen = follower.snapshot(0).run
    assert (seen.run, seen.lead, seen.state) == (run, "alpha", "running")


# ---------------------------------------------------------------- what clients see


def test_the_log_of_any_rank_comes_from_any_agent(group):
    cluster, run = group
    for asked in NODES:
        with cluster.client(asked) as client:
            for rank, node in enumerate(NODES):
                assert client.log(run, rank).text == cluster.run_paths(node, run).log(rank).read_text()
            with pytest.raises(RefusedError, match="rank 7"):
                client.log(run, 7)


async def test_who_follows_the_cluster_through_any_agent_sees_the_lead_in_full_and_every_machine(group):
    """One agent stalls for a while: the line to it, the lead's word of its rank and the steps all show it."""
    cluster, run = group
    seen: dict[str, set[str]] = {node: set() for node in ("", *NODES)}
    steps, gamma, whys, stood = [], [], [], 0
    stalled = cluster["gamma"].process
    try:
        async with asyncio.timeout(90), contextlib.aclosing(attach_cluster(cluster["beta"].address, 20)) as items:
            async for node, item in items:
                seen[node].add(type(item).__name__)
                if isinstance(item, m.Snapshot):
                    assert (node, item.run.run, len(item.peers)) == ("alpha", run, 2)
                elif isinstance(item, m.StepCommitted):
                    steps.append(item.step)
                elif isinstance(item, m.RunView):
                    whys += [rank.why for rank in item.ranks if rank.state == "away"]
                elif isinstance(item, Connection) and node == "gamma":
                    gamma.append(item.state)
                if gamma == ["connecting", "connected"] and len(steps) > 5 and "HostReading" in seen["gamma"]:
                    stalled.send_signal(signal.SIGSTOP)
                    gamma = ["stalled"]
                elif "silent" in gamma and whys:
                    stalled.send_signal(signal.SIGCONT)
                    if gamma[-1] == "connected" and steps[-1] > stood + 5:
                        break
                else:
                    stood = steps[-1] if steps else 0
    finally:
        stalled.send_signal(signal.SIGCONT)
    assert steps == list(range(steps[0], steps[0] + len(steps)))
    assert any("the agent of gamma" in why for why in whys), whys
    assert seen["alpha"] >= {"Snapshot", "StepCommitted", "RankStep", "HostReading", "Heartbeat", "Connection"}
    assert seen["beta"] == seen["gamma"] == {"HostReading", "Heartbeat", "Connection"}
