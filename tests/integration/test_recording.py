"""The scripted demonstration as a person or a script starts it: one object, the same each time, and no process left."""

import json
import subprocess
import sys
from typing import Any

from tests.waiting import HANG_SECONDS

DEADLINE_SECONDS = HANG_SECONDS


def trainctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trainctl.tui.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)


def played(*arguments: str) -> dict[str, Any]:
    done = trainctl("demo", "--scripted", "--json", "--speed=200", *arguments)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_scripted_demo_plays_the_same_each_time() -> None:
    one, other = played("--nodes=3"), played("--nodes=3")
    assert one == other
    assert one["ok"] and one["recording"] and one["state"] == "finished" and one["steps"] == 300
    assert [node["name"] for node in one["nodes"]] == ["torch-a", "torch-b", "torch-c"]
    assert one["error"] >= 1 and one["warning"] >= 2 and one["generation"] == "g1.3"


def test_tables_of_a_run_come_through_its_agent() -> None:
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "play", "--nodes=3", "--begin=40", "--rate=0.1"]
    with subprocess.Popen([*command, "--leash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as player:
        assert player.stdout is not None and player.stdin is not None
        try:
            address = json.loads(player.stdout.readline())["listen"]
            tables = {}
            for what in ("steps", "ranks", "events", "metrics", "hosts"):
                done = trainctl("export", "demo-recording", "--what", what, "--format=jsonl", "--connect", address)
                assert done.returncode == 0, done.stderr
                tables[what] = [json.loads(line) for line in done.stdout.splitlines()]
            unknown = trainctl("export", "another", "--connect", address)
        finally:
            player.stdin.close()
    assert 40 <= len(tables["steps"]) <= 45
    assert len(tables["ranks"]) >= 3 * 40
    assert {type(row["rank"]) for row in tables["ranks"]} == {int}
    assert all(row["busy_seconds"] > 0 for row in tables["ranks"])
    assert any(row["verb"] == "start-run" for row in tables["events"])
    assert tables["metrics"] == []  # it brings none of its own
    assert unknown.returncode == 3 and unknown.stderr.count("\n") == 1


def test_what_only_a_recording_can_do_is_refused_without_one() -> None:
    for arguments, wrong in (
        (("--speed=2",), "--speed"),
        (("--nodes=60",), "--scripted"),
    ):
        done = trainctl("demo", "--headless", *arguments)
        assert done.returncode == 2
        assert wrong in done.stderr and done.stderr.count("\n") == 1
