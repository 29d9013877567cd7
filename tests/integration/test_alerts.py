"""Alerts of a real run with no screen open: raised, given to a real program, kept while the lead's agent is gone."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.asking import events_of
from tests.cluster.run_files import RING, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.integration.support.ports import free_addresses
from tests.waiting import until

from trainctl.protocol import messages as m
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.tui.cli.main import main

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
