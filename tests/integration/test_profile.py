"""Profiles of real runs: at one step, without a trace in the curve, with our phases, and fetched whole."""

import gzip
import hashlib
import json
from collections.abc import Callable
from typing import Any

from tests.integration.conftest import all_steps, wait_for_end, wait_for_step
from tests.integration.support.clusters import Cluster, on
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import events as e

Make = Callable[..., dict[str, Any]]


def steps_of(
    client: BlockingClient, config: dict[str, Any], *, profiles: bool, least: int = 2
) -> tuple[str, list[Any], list[e.Profiled]]:
    """A run's ID, its losses, and its profiles. It is paused when the profile is asked for, for its steps are short.
    The norm of a step is that of the rank that reported first, so it may differ between two runs."""
    begun = client.send("start-run", {"config": config})
    assert begun.state == "applied", begun.reason
    assert begun.run is not None
    wait_for_step(client, 2)
    found = []
    if profiles:
        assert client.send("pause", {}).state == "applied"
        reply = client.send("profile", {"steps": 2, "nodes": ["alpha", "gamma"]})
        assert reply.state == "applied", reply.reason
        assert reply.step is not None
        at = reply.step
        assert reply.after == f"steps {at + 2} to {at + 3} on alpha, gamma; step {at + 1} warms up"
        assert client.send("resume", {}).state == "applied"
        found = until(lambda: both(client.traces(begun.run).profiles), what="two traces")
        assert {(one.first_step, one.last_step) for one in found} == {(at + 2, at + 3)}
    wait_for_step(client, max([least, *(one.last_step + 3 for one in found)]))
    assert client.send("stop", {"checkpoint": False}).state == "applied"
    wait_for_end(client)
    return begun.run, [step.loss for step in all_steps(client, begun.run)], found


def test_a_profile_on_torch_and_mlx_changes_no_bit_and_its_traces_are_whole(cluster: Cluster, run_config: Make) -> None:
    nodes = on("alpha", "gamma", gamma={"backend": "mlx"})
    config = run_config(run__steps=1_000_000, nodes=nodes, group={"first_shares": "even"})
    with cluster.client() as client:
        run, profiled, found = steps_of(client, config, profiles=True)
        last = found[0].last_step
        _, plain, _ = steps_of(client, config, profiles=False, least=last + 3)
    assert profiled[: last + 3] == plain[: last + 3]
    by_node = {one.node: one for one in found}
    torch, mlx = by_node["alpha"], by_node["gamma"]
    passes = {"data", "forward", "backward", "sync", "optimizer"}
    assert all({phase.name for phase in one.phases} == passes for one in found)
    assert (torch.lacks, "no operators" in mlx.lacks) == ("", True)
    forward = next(phase for phase in torch.phases if phase.name == "forward")
    assert 0 < len(forward.operators) <= m.OPERATORS_KEPT
    assert all(one.calls and one.name.startswith("aten::") for one in forward.operators)
    for one in found:
        path = cluster.run_paths(one.node, run).profiles / one.file
        content = path.read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (one.size_bytes, one.digest)
        assert passes <= {event.get("name") for event in json.loads(gzip.decompress(content))["traceEvents"]}
        assert [path.name for path in path.parent.iterdir()] == [one.file]


def both(events: tuple[m.Event, ...]) -> list[e.Profiled]:
    found = [event.data for event in events if isinstance(event.data, e.Profiled)]
    return found if len(found) == 2 else []
