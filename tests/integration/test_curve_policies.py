"""Policies and alerts of real runs: what is raised, called about and kept, what is skipped, and what stays as it is."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.asking import events_of, run_of
from tests.cluster.run_files import RING, on, on_mlx
from tests.cluster.waits import all_steps, wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.integration.support.clusters import Cluster
from tests.integration.support.exactness import worst_deviation
from tests.integration.support.ports import free_addresses
from tests.tiers import scale
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config.policies import POLICIES
from trainctl.tui.cli.main import main

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
    """Return the losses of two ranks whose shares are wrong, with all curve-neutral policies in a mode."""
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


NODES = ("alpha", "beta")
KEEP = """
import json, os, sys
call = json.load(sys.stdin)
with open(os.path.join(sys.argv[1], call["agent"]), "a") as file:
    print(json.dumps([call["event"], os.environ["TRAINCTL_ALERT_ID"]]), file=file)
"""


def calls(folder: Path, node: str) -> list[list[str]]:
    file = folder / node
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def open_alerts(client: BlockingClient) -> dict[str, m.AlertView]:
    told = client.ask(m.SnapshotRequest, 0).alerts
    return {alert.id: alert for alert in told.alerts} if told is not None else {}


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """Two agents whose cluster file names a program to call."""
    script, file = tmp_path / "keep.py", tmp_path / "cluster.toml"
    script.write_text(KEEP)
    hook = json.dumps([sys.executable, "-S", str(script), str(tmp_path)])
    tables = [f'[nodes.{node}]\naddress = "{at}"' for node, at in zip(NODES, free_addresses(2), strict=True)]
    file.write_text("\n".join([f"[alerts]\ncommand = {hook}", *tables, ""]))
    agents = [AgentProcess(tmp_path / "state", node, file).start() for node in NODES]
    yield agents
    for agent in reversed(agents):
        agent.clean_up()


def test_alerts_are_raised_called_about_and_kept(
    pair: Any, run_config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alpha, beta = pair
    # No disk has so much room, so that both nodes' readings are alerts; the follower's have to come to the lead first.
    limits = {"disk_free_gb": 1e9, "disk_clear_gb": 2e9, "silent_seconds": 3, "clear_seconds": 1}
    config = run_config(run__steps=100_000, nodes=on_mlx(*NODES), group=RING, alerts=limits)
    with alpha.client() as client, beta.client() as other:
        until(
            lambda: all(peer.state == "connected" for peer in client.ask(m.SnapshotRequest, 0).peers),
            20,
            "the follower",
        )
        run = client.send("start-run", {"config": config}, wait="accepted").run
        # Readings come before the first step: all of this happens while the trainers load.
        until(lambda: {"disk:alpha", "disk:beta"} <= set(open_alerts(client)), 20, "both nodes' alerts")
        raised = {id: alert.raised_at for id, alert in open_alerts(client).items() if id.startswith("disk")}
        until(lambda: len(calls(tmp_path, "alpha")) >= 2, 20, "the calls")
        assert client.send("acknowledge", {"id": "disk:beta"}).state == "applied"
        assert client.send("mute", {"kind": "disk"}, node="alpha").after == "disk for 60 min"
        assert client.send("acknowledge", {"id": "stall"}).field == "id"

        alpha.kill()
        until(lambda: set(open_alerts(other)) == {"lead-silent:beta"}, 20, "the follower's alert")
        until(lambda: ["raised", "lead-silent:beta"] in calls(tmp_path, "beta"), 20, "the follower's call")
        assert other.send("acknowledge", {"id": "lead-silent:beta"}).state == "applied"

        alpha.start()
        until(lambda: client.ask(m.SnapshotRequest, 0).alerts, 20, "the lead's alerts")
        again = open_alerts(client)
        assert {id: again[id].raised_at for id in raised} == raised
        assert (again["disk:beta"].acknowledged_by, again["disk:alpha"].muted) == ("tester", True)
        until(lambda: not open_alerts(other), 20, "the lead's return")
        assert main(["alerts", "--json", "--connect", alpha.address]) == 0
        assert {"disk:alpha", "disk:beta"} <= {alert["id"] for alert in json.loads(capsys.readouterr().out)["alerts"]}

        wait_for_step(client, 2, 120)
        client.send("stop", {"checkpoint": False})
        assert wait_for_end(client).run == run
        until(lambda: all(id.startswith("disk") for id in open_alerts(client)), 20, "the end of the run's alerts")
        told = [(event.severity, event.after) for event in events_of(client, run) if event.kind == "alert"]
        assert told.count(("warning", "disk:beta")) == 1
        assert told.count(("warning", "disk:alpha")) == 2, "raised, and still so on the lead's own machine at the end"
        assert not [severity for severity, id in told if severity == "good" and id.startswith("disk")]
    until(lambda: ["cleared", "disk:beta"] in calls(tmp_path, "alpha"), 20, "the last call")
    assert sorted(call for call in calls(tmp_path, "alpha") if call[1].startswith("disk")) == [
        ["cleared", "disk:beta"], ["raised", "disk:alpha"], ["raised", "disk:beta"],
    ]  # fmt: skip
