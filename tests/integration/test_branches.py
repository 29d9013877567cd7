"""Branches and comparisons of real runs: the same losses with the same recipe, and each difference with its step."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.asking import events_of
from tests.cluster.run_files import FOREVER, NODE, RING, TORCH, on_mlx
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.integration.support.clusters import Cluster
from tests.tui.support import page_checks
from tests.tui.support.cli_calls import call

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages.events import SetupChanged

STEPS, FORK = 12, 6


def losses(client: BlockingClient, run: str) -> dict[int, float | None]:
    return {step.step: step.loss for step in all_steps(client, run)}


def changes_of(client: BlockingClient, run: str) -> list[SetupChanged]:
    return [event.data for event in events_of(client, run) if isinstance(event.data, SetupChanged)]


def finished(client: BlockingClient, first_step: int | None = None, **args: Any) -> m.RunView:
    """A run that has been started and has run to its end."""
    begun = client.send("start-run", args)
    assert begun.state == "applied", begun.reason
    assert first_step in (None, begun.step)
    view = wait_for_end(client)
    assert view.state == "finished", view.reason
    return view


def branched(client: BlockingClient, branch: str, **args: Any) -> m.RunView:
    """A branch that has run to its end."""
    return finished(client, FORK + 1, branch=branch, **args)


def test_a_branch_with_the_same_recipe_has_the_same_losses_bit_for_bit(agent: AgentProcess, run_config: Any) -> None:
    table = {
        "every_steps": FORK // 2,
        "keep_last": 1000,
        "background": False,
    }  # else one that is due may wait for another
    with agent.client() as client:
        config = run_config(run__steps=STEPS, nodes=on_mlx(NODE), checkpoint=table)
        parent = finished(client, config=config)
        curve = losses(client, parent.run)
        view = branched(client, f"{parent.run}@{FORK}")
        assert losses(client, view.run) == {step: loss for step, loss in curve.items() if step > FORK}
        other = branched(client, f"{parent.run}@{FORK}", overrides={"optimizer.learning_rate": "1e-2"})
        changed = losses(client, other.run)
        assert changed[FORK + 1] == curve[FORK + 1], "the weights are the checkpoint's"
        assert changed[STEPS] != curve[STEPS]

        assert not changes_of(client, other.run)
        elsewhere = {"model.dtype": "bfloat16", f"nodes.{view.lead}.backend": "torch"}
        moved = branched(client, f"{parent.run}@{FORK}", overrides=elsewhere)
        (changes,) = changes_of(client, moved.run)
        assert changes.step == FORK
        for part in ("torch instead of mlx", "passes in bfloat16 instead of passes in float32"):
            assert part in changes.changes[0]


@pytest.mark.tier("soak")
@pytest.mark.parametrize("nodes", [{NODE: TORCH}, on_mlx(NODE)], ids=["torch", "mlx"])
def test_a_branch_at_50_of_100_from_a_background_checkpoint_has_the_same_losses_bit_for_bit(
    agent: AgentProcess, run_config: Any, nodes: dict[str, Any]
) -> None:
    """The first checkpoint waits for no other, so it is of the step at which it falls due."""
    steps, fork = 100, 50
    config = run_config(run__steps=steps, nodes=nodes, checkpoint={"every_steps": fork, "background": True})
    with agent.client() as client:
        parent = finished(client, config=config)
        branch = finished(client, fork + 1, branch=f"{parent.run}@{fork}")
        curve = losses(client, parent.run)
        assert [*curve] == [*range(1, steps + 1)]
        first, last = curve[1], curve[steps]
        assert first and last and last < 0.9 * first, "it has to learn for this to mean anything"
        assert losses(client, branch.run) == {step: loss for step, loss in curve.items() if step > fork}
        assert not changes_of(client, branch.run)


SHARES, MOVED = {"alpha": 8, "beta": 4}, {"alpha": 4, "beta": 8}


def trained(cluster: Cluster, config: dict[str, Any]) -> Path:
    """The directory of a finished run."""
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied" and begun.run is not None, begun.reason
        view = wait_for_end(client)
        assert view.state == "finished", view.reason
    return cluster.run_paths("alpha", begun.run).directory


def rebalanced(cluster: Cluster, config: dict[str, Any]) -> tuple[Path, int]:
    """The directory of a run whose samples moved, and at which step; it is stopped some steps later."""
    with cluster.client() as client:
        begun = client.send("start-run", {"config": config | {"run": config["run"] | {"steps": FOREVER}}})
        assert begun.state == "applied" and begun.run is not None, begun.reason
        wait_for_step(client, 3)
        moved = client.send("rebalance", {"shares": MOVED})
        assert moved.state == "applied" and moved.step is not None, moved.reason
        wait_for_step(client, moved.step + 6)
        assert client.send("stop", {}).state == "applied"
        assert wait_for_end(client).state == "stopped"
    return cluster.run_paths("alpha", begun.run).directory, moved.step


def differences(one: Path, other: Path) -> dict[str, Any]:
    done = call("diff", one, other, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == int(not found["same"])
    return found


@pytest.mark.timeout(600)
def test_planted_differences_of_real_runs_are_found_with_their_step(cluster, run_config, small_assets, tmp_path):
    """Samples moved during the run, which is the same bit for bit before; another seed and row of the data; another
    library."""
    text = (small_assets / "text" / "a.txt").read_text("utf-8")
    data = tmp_path / "text" / "a.txt"
    data.parent.mkdir()
    data.write_text(text, "utf-8")
    config = run_config(
        data__path=str(data.parent), checkpoint__at_end=True, optimizer__schedule="constant",
        nodes=on_mlx(*SHARES, **{node: {"share": share} for node, share in SHARES.items()}), group=RING,
    )  # fmt: skip
    moved, step = rebalanced(cluster, config)
    config["run"]["steps"] = step + 10
    base = trained(cluster, config)
    found = differences(base, moved)
    assert ([one["name"] for one in found["recipe"]], found["data"], found["versions"]) == (["run.steps"], [], [])
    assert [one["step"] for one in found["plans"] if one["b"] == "alpha 4, beta 8"] == [step]
    first = found["curve"]["first"]
    assert step > 3 and first is not None and first["step"] >= step
    page = tmp_path / "page.html"
    assert call("report", moved, "--html", page).returncode == 0
    assert "rebalanced: alpha 8 → 4, beta 4 → 8" in page_checks.check(page.read_text("utf-8")).text

    data.write_text(text.replace("import", "impart", 1), "utf-8")
    found = differences(base, trained(cluster, config | {"run": config["run"] | {"seed": 4}}))
    assert [(one["name"], one["a"], one["b"]) for one in found["recipe"]] == [("run.seed", "3", "4")]
    assert [one["name"] for one in found["data"]] == ["digest"]
    assert (found["curve"]["first"]["step"], found["versions"], found["plans"]) == (1, [], [])

    other = shutil.copytree(base, tmp_path / "other")
    for manifest in other.glob("checkpoints/*/manifest.json"):
        manifest.write_text(re.sub(r'"mlx [^"]*"', '"mlx 0.0.1"', manifest.read_text("utf-8")), "utf-8")
    found = differences(base, other)
    assert [(one["name"], one["b"]) for one in found["versions"]] == [("library on alpha", "mlx 0.0.1")]
    assert (found["curve"]["first"], found["curve"]["common_steps"], found["unknown"]) == (None, step + 10, [])
