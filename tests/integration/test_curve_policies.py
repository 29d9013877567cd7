"""Policies on real runs: a poisoned block of data is skipped, and what should leave the curve as it is does so."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.asking import events_of, run_of
from tests.cluster.run_files import on
from tests.cluster.waits import all_steps, wait_for_end
from tests.integration.conftest import AgentProcess
from tests.integration.support.clusters import Cluster
from tests.integration.support.exactness import worst_deviation
from tests.tiers import scale

from trainctl.protocol import messages as m
from trainctl.protocol.config.policies import POLICIES

STEPS = scale("policy steps")
MOST_DEVIATION = 1e-6
"""Relative difference of two losses."""
NEUTRAL = [name for name, entry in POLICIES.items() if not entry.changes_curve]
G = 12
POISONED = range(60, 85)
"""Batches, from 0 on, whose samples are of random bytes."""


def poisoned_rows(path: Path, batches: int) -> None:
    """Lines of one phrase, but for the poisoned batches."""
    chance = random.Random(1)
    usual = "the loss goes down and down"
    with path.open("w", encoding="utf-8") as file:
        for batch in range(batches):
            for _ in range(G):
                noise = "".join(chr(chance.randrange(33, 127)) for _ in usual)
                file.write(json.dumps({"text": noise if batch in POISONED else usual}) + "\n")
    path.with_name(path.name + ".end").touch()


def test_a_run_goes_back_before_a_poisoned_block_skips_it_and_says_so(
    agent: AgentProcess, run_config: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    poisoned_rows(path, 160)
    data = {
        "path": str(path), "kind": "rows", "tokenizer": "bytes", "sequence_length": 24, "growing": True,
        "chunk_samples": G,
    }  # fmt: skip
    spike = {"mode": "on", "recover_steps": 5, "min_back": 5, "skip_batches": 30}
    config = run_config(  # training waits for checkpoints, so that there is one of every tenth step
        run__steps=110, data=data, policy={"spike": spike},
        checkpoint={"every_steps": 10, "keep_last": 10, "at_end": False, "background": False},
    )  # fmt: skip
    with agent.client() as client:
        begun = client.send("start-run", {"config": config})
        assert begun.state == "applied", begun.reason
        assert wait_for_end(client).state == "finished"
        events, steps = events_of(client, begun.run), all_steps(client)
        view = run_of(client)
    acted = [event.text for event in events if event.by == "auto:spike"]
    assert any(text.startswith("policy spike: sends rollback step=60 skip_batches=30 (loss ") for text in acted), acted
    assert view is not None and view.skipped
    skipped = {position for start, count in view.skipped for position in range(start, start + count)}
    for start, count in view.skipped:
        said = f"positions {start:,} to {start + count - 1:,} are skipped: their samples aren't trained on"
        assert any(said in event.text for event in events)
    trained = {position for step in steps for position in range(step.cursor - G, step.cursor)}
    poison = {batch * G + sample for batch in POISONED for sample in range(G)}
    assert not trained & skipped
    assert poison <= skipped
    losses = {step.step: step.loss for step in steps}
    assert max(losses[step] for step in range(100, 111)) < 2 * max(losses[step] for step in range(45, 56)), losses


def losses(cluster: Cluster, run_config: Any, mode: str) -> tuple[list[m.StepCommitted], list[m.Event]]:
    """Of two ranks whose shares are wrong, with all curve-neutral policies in a mode."""
    policy: dict[str, dict[str, Any]] = {name: {"mode": mode} for name in NEUTRAL}
    policy["rebalance"] |= {"gain": 0.001, "at_once": 0.001, "windows": 1, "quiet_steps": 1}  # it acts on noise too
    nodes = on("alpha", "beta", alpha={"share": 11}, beta={"share": 1})
    optimizer = {"learning_rate": 1e-3, "warmup_steps": 3}
    config = run_config(run__steps=STEPS, run__name=f"policies-{mode}", nodes=nodes, policy=policy, optimizer=optimizer)
    with cluster.client("alpha") as client:
        begun = client.send("start-run", {"config": config}, timeout_seconds=120)
        assert begun.state == "applied", begun.reason
        assert wait_for_end(client, 600).state == "finished"
        return all_steps(client), events_of(client, begun.run)


@pytest.mark.usefixtures("small_assets")
def test_curve_neutral_policies_leave_every_loss_as_it_is(cluster: Cluster, run_config: Any) -> None:
    with_policies, events = losses(cluster, run_config, "on")
    without, silent = losses(cluster, run_config, "off")
    acted = {event.by for event in events if event.by.startswith("auto:") and event.verb}
    assert "auto:rebalance" in acted, "no policy acted, so nothing is compared"
    assert not [event for event in silent if event.by.startswith("auto:")]
    assert len(with_policies) == len(without) == STEPS
    worst = worst_deviation(with_policies, without)
    print(f"worst relative difference of {STEPS} losses: {worst:.2g}; acted: {', '.join(sorted(acted))}")
    assert worst <= MOST_DEVIATION
