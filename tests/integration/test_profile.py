"""Profiles of real runs: at one step, without a trace in the curve, with our phases, and copied whole."""

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.asking import events_of
from tests.cluster.run_files import on
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster
from tests.tui.support.cli_calls import call_json

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import events as e

Make = Callable[..., dict[str, Any]]
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
