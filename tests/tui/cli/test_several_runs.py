"""Several runs on one cluster: each is named, steered and ended by itself, and no command takes one by chance."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from tests.cluster.in_process import BlockingCluster
from tests.cluster.run_files import FOREVER, on
from tests.tui.support.cli_calls import assert_one_line, call, call_json
from tests.waiting import until


@pytest.fixture
def two(cluster: BlockingCluster, run_config: Callable[..., dict[str, Any]], tmp_path: Path) -> dict[str, str]:
    """Runs of two nodes, by node, started by files that name the node."""
    found = {}
    for node in ("gamma", "beta"):
        file = tmp_path / f"{node}.toml"
        file.write_text(tomli_w.dumps(run_config(run__steps=FOREVER, run__name=node, nodes=on(node))), "utf-8")
        done = call("run", file, "--cluster", cluster.file)
        assert done.returncode == 0, done.stderr
        found[node] = done.stdout.strip()
    return found


def test_a_command_without_a_run_is_refused_with_their_names(cluster: BlockingCluster, two: dict[str, str]) -> None:
    at = ("--cluster", cluster.file)
    for words in (("send", "note", "text=x"), ("send", "stop"), ("status",), ("events",), ("logs",), ("alerts",)):
        assert_one_line(call(*words, *at), 2, "several runs are active: ", *two.values())
    assert {row["run"] for row in call_json("ls", *at)["runs"]} == {*two.values()}
    assert call("keys", "audit", *at).returncode == 0, "which is of an agent, not of a run"
    assert_one_line(call("status", "other", *at), 2, "no agent knows other; active: ")


def test_each_is_steered_and_ended_by_its_name(cluster: BlockingCluster, two: dict[str, str]) -> None:
    at = ("--cluster", cluster.file)
    for node, run in two.items():
        assert call("send", "note", f"text=to {node}", "--run", run, *at).returncode == 0
        assert call_json("status", node, *at)["run"]["run"] == run, "by its name"
    for node, run in two.items():
        said = call("events", run, *at).stdout
        assert f"to {node}" in said and sum(f"to {other}" in said for other in two) == 1
        assert call_json("status", run, *at)["run"]["lead"] == node
        assert call_json("alerts", run, *at)["watched"]
    first, second = two.values()
    assert call("send", "stop", "--run", first, *at).returncode == 0

    def states() -> dict[str, str]:
        return {row["run"]: row["state"] for row in json.loads(call("ls", "--json", *at).stdout)["runs"]}

    until(lambda: states()[first] == "stopped", what="the end of the first")
    assert states()[second] == "running"
    assert call("send", "note", "text=alone now", *at).returncode == 0, "one is left, so it needs no name"
