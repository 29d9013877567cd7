"""Samples and profiles of real runs: without a trace in the curve, from each backend, in every record."""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.asking import events_of, run_of
from tests.cluster.run_files import on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.integration.support.clusters import Cluster
from tests.tui.support.cli_calls import call, call_json
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import events as e
from trainctl.protocol.record.reader import RecordReader

STEPS, PROMPTS = 40, ["def value", "import"]
Make = Callable[..., dict[str, Any]]


def everything(client: BlockingClient, config: dict[str, Any]) -> tuple[str, list[m.StepCommitted]]:
    begun = client.send("start-run", {"config": config})
    assert begun.state == "applied", begun.reason
    view = wait_for_end(client)
    assert (view.state, view.step) == ("finished", STEPS), view.reason
    assert begun.run is not None
    return begun.run, all_steps(client, begun.run)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_twenty_samples_and_ten_evaluations_change_no_bit_of_the_curve(
    backend: str, agent: AgentProcess, run_config: Make
) -> None:
    nodes = {"box": {"backend": backend, "device": "cpu", "threads": 1}}
    asks = {"prompts": PROMPTS, "every_steps": 2, "max_tokens": 8, "temperature": 1.0, "seed": 3}
    with agent.client() as client:
        _, plain = everything(client, run_config(run__steps=STEPS, nodes=nodes))
        run, sampled = everything(
            client, run_config(run__steps=STEPS, nodes=nodes, samples=asks, evaluate={"every_steps": 4})
        )
        found = client.ask(m.SamplesRequest, run).samples
    curves = [[(step.loss, step.grad_norm) for step in steps] for steps in (plain, sampled)]
    assert curves[0] == curves[1]
    assert [(one.step, one.number) for one in found] == [(at, n) for at in range(2, STEPS + 1, 2) for n in (0, 1)]
    with RecordReader(agent.run_paths(run)) as reader:
        assert len(reader.evaluations()) == STEPS // 4
    by_step = {step.step: step.loss for step in sampled}
    assert all(one.loss == by_step[one.step] and one.by == "auto" and one.tokens for one in found)
    assert {one.step for one in found if one.eval_loss is not None} == set(range(4, STEPS + 1, 4))


def test_each_node_of_a_mixed_cluster_answers_alike_and_all_have_the_record(cluster: Cluster, run_config: Make) -> None:
    nodes, even = on("alpha", "gamma", gamma={"backend": "mlx"}), {"first_shares": "even"}
    config = run_config(run__steps=1_000_000, nodes=nodes, checkpoint={"at_end": False}, group=even)
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        wait_for_step(client, 3)
        assert client.send("pause", {}).state == "applied"
        asked = {"prompt": "def value", "max_tokens": 6, "seed": 2}
        replies = [client.send("sample", asked, node=node) for node in ("alpha", "gamma")]
        assert [reply.state for reply in replies] == ["applied", "applied"], [reply.reason for reply in replies]
        assert replies[0].after == replies[1].after
        found = client.ask(m.SamplesRequest, begun.run).samples
        assert [(one.node, one.answer, one.prompt) for one in found] == [
            (node, replies[0].after, "def value") for node in ("alpha", "gamma")
        ]
        refused = [client.send("sample", {}), client.send("sample", asked, node="nowhere")]
        assert [(reply.state, reply.field) for reply in refused] == [("rejected", "prompt"), ("rejected", "node")]
        assert client.send("resume", {}).state == "applied"
        wait_for_step(client, run_of(client).step + 3)
        until(lambda: samples_on(cluster, "gamma", begun.run) == found, what="the follower's copy of the answers")
        failed = client.send("sample", {"prompt": "hello", "chat": True})
        assert (failed.state, "chat template" in failed.reason) == ("failed", True)
        events = client.ask(m.EventsRequest, begun.run, limit=20, newest=True).events
        assert any(isinstance(event.data, e.SampleFailed) and event.data.node == "alpha" for event in events)
        wait_for_step(client, run_of(client).step + 3)
        assert client.send("stop", {"checkpoint": False}).state == "applied"
        wait_for_end(client)


def samples_on(cluster: Cluster, node: str, run: str) -> tuple[m.Sample, ...]:
    """Return what a node's record has, without the publisher's numbers."""
    with RecordReader(cluster.run_paths(node, run)) as reader:
        return reader.samples()[0]


def test_a_script_gets_the_answer_and_an_export_all_of_them(live: AgentProcess, tmp_path: Path) -> None:
    done = call("send", "sample", "prompt=def x", "max_tokens=5", "--connect", live.address)
    assert done.returncode == 0, done.stderr
    told = call_json("send", "sample", "prompt=def x", "max_tokens=5", "--connect", live.address)
    assert (told["verb"], told["state"]) == ("sample", "applied")
    first, _, answer = done.stdout.partition("\n")
    assert first.startswith("sample applied at step ")
    assert told["after"] and answer


PHASES = {"data", "forward", "backward", "sync", "optimizer"}


def begin(client: BlockingClient, config: dict[str, Any], step: int) -> str:
    """Start a run, and wait for a step of it."""
    begun = client.send("start-run", {"config": config})
    assert begun.state == "applied", begun.reason
    assert begun.run is not None
    wait_for_step(client, step)
    return begun.run


def end(client: BlockingClient, run: str) -> list[float]:
    """The losses of a run that is stopped. The norms may differ between runs: they are the first reporter's."""
    assert client.send("stop", {"checkpoint": False}).state == "applied"
    wait_for_end(client)
    return [step.loss for step in all_steps(client, run)]


def test_a_profile_on_torch_and_mlx_changes_no_bit_and_its_traces_are_copied(
    cluster: Cluster, run_config: Make, tmp_path: Path
) -> None:
    nodes = on("alpha", "gamma", gamma={"backend": "mlx"})
    config = run_config(run__steps=1_000_000, nodes=nodes, group={"first_shares": "even"})
    options = ("--connect", cluster["alpha"].address, "--out", str(tmp_path), "--json")
    with cluster.client() as client:
        run = begin(client, config, 2)
        made = call_json("profile", "--steps", "2", "--node", "alpha", "--node", "gamma", *options)
        last = made["last_step"]
        wait_for_step(client, last + 3)
        profiled = end(client, run)
        commands = [event.data for event in events_of(client, run) if event.verb == "profile"]
        plain = end(client, begin(client, config, last + 3))
        assert call_json("profile", run, "--last", *options) == made, "the record has it after the run's end"
    assert profiled[: last + 3] == plain[: last + 3]
    steps = f"steps {last - 1} to {last} on alpha, gamma; step {last - 2} warms up"
    assert commands == [e.CommandApplied("", steps)]
    assert [(rank["node"], rank["rank"], rank["last_step"]) for rank in made["ranks"]] == [
        ("alpha", 0, last), ("gamma", 1, last)
    ]  # fmt: skip
    for rank, file in zip(made["ranks"], made["files"], strict=True):
        content = Path(file).read_bytes()
        own = cluster.run_paths(rank["node"], run).profiles / rank["file"]
        assert own.read_bytes() == content
        assert hashlib.sha256(content).hexdigest() == rank["digest"]
        assert [path.name for path in own.parent.iterdir()] == [own.name]
        names = {event.get("name") for event in json.loads(gzip.decompress(content))["traceEvents"]}
        assert PHASES | {f"step {last - 1}", f"step {last}"} <= names
        assert {phase["name"] for phase in rank["phases"]} == PHASES
    torch, mlx = made["ranks"]
    assert (torch["lacks"], "no operators" in mlx["lacks"]) == ("", True)
    forward = next(phase for phase in torch["phases"] if phase["name"] == "forward")
    assert 0 < len(forward["operators"]) <= m.OPERATORS_KEPT
    assert all(one["calls"] and one["name"].startswith("aten::") for one in forward["operators"])
