"""Branches of real runs: the same losses with the same recipe, and lineage in both records."""

from pathlib import Path
from typing import Any

import pytest
from tests.asking import events_of
from tests.cluster.run_files import NODE, TORCH, on_mlx
from tests.cluster.waits import all_steps, wait_for_end
from tests.integration.conftest import AgentProcess

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages.events import RunBranched, SetupChanged
from trainctl.protocol.record.checkpoints import ParentCheckpoint, read_manifest

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
        assert view.branch == m.BranchPoint(parent.run, FORK, 12 * FORK)
        assert view.trained(12 * STEPS) == 12 * (STEPS - FORK)
        assert {run.run: run.branch for run in client.ask(m.RunsRequest).runs} == {
            parent.run: None,
            view.run: view.branch,
        }
        for run in (parent.run, view.run):
            kept = [event.data for event in events_of(client, run) if isinstance(event.data, RunBranched)]
            assert kept == [RunBranched(parent.run, FORK, view.run, view.lead)]

        about = read_manifest(Path(view.directory, "checkpoints", f"step-{STEPS}")).metadata
        assert about is not None
        assert about.lineage.parent == ParentCheckpoint(parent.run, FORK)

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
