"""The simulated demo as a person or a script starts it: real agents and commands, one object, and no process left."""

import json
import subprocess
import sys
from pathlib import Path

from tests.asking import run_of
from tests.tui.support.simulated_cluster import simulated_cluster
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import SnapshotRequest
from trainctl.tui.demo import simulated


def trainctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trainctl.tui.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_a_simulated_demo_is_seen_to_its_end_and_leaves_its_record(tmp_path: Path) -> None:
    done = trainctl("demo", "--simulated", "--json", "--nodes=3", "--steps=4", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["simulated"] and found["state"] == "finished" and found["steps"] == 4
    assert [node["name"] for node in found["nodes"]] == [*simulated.nodes(3)]
    assert "no model was trained" in done.stderr
    listed = trainctl("export", found["run_directory"], "--what", "steps", "--format=jsonl")
    assert len(listed.stdout.splitlines()) == 4, listed.stderr


def test_a_simulated_run_is_steered_loses_a_trainer_and_takes_it_back(tmp_path: Path) -> None:
    """Each command is applied at a step; the trainer that dies comes back into the group."""
    last = [*simulated.nodes(2)][-1]
    with (
        simulated_cluster(tmp_path, 2, 1000) as cluster,
        BlockingClient(cluster.address, by="tester", timeout_seconds=HANG_SECONDS) as client,
    ):

        def view():
            found = run_of(client)
            assert found is not None
            return found

        assert view().simulated
        for verb, arguments, node in (
            ("pause", {}, None), ("resume", {}, None), ("resize-batch", {"micro": 4}, last),
            ("set-global-batch", {"value": 8}, None), ("set-lr", {"value": 1e-3}, None),
        ):  # fmt: skip
            assert client.send(verb, arguments, node=node).state == "applied", verb
        until(lambda: view().step > simulated.DEATH_STEP and view().generation.n > 1, HANG_SECONDS, "the death")
        until(lambda: all(rank.state == "run" for rank in view().ranks), HANG_SECONDS, "the return")
        peers = client.ask(SnapshotRequest, 0).peers
        assert [(peer.node, peer.state) for peer in peers] == [(last, "connected")]
        assert client.send("stop", {"checkpoint": False}).state == "applied"


def test_tables_of_a_run_come_through_its_agent(tmp_path: Path) -> None:
    with simulated_cluster(tmp_path, 3, 6) as cluster:
        with BlockingClient(cluster.address, timeout_seconds=HANG_SECONDS) as client:
            until(lambda: run_of(client).state == "finished", HANG_SECONDS, "the end")
        tables = {}
        for what in ("steps", "ranks", "events", "metrics", "hosts"):
            done = trainctl("export", cluster.run, "--what", what, "--format=jsonl", "--connect", cluster.address)
            assert done.returncode == 0, done.stderr
            tables[what] = [json.loads(line) for line in done.stdout.splitlines()]
        unknown = trainctl("export", "another", "--connect", cluster.address)
    assert [row["step"] for row in tables["steps"]] == [*range(1, 7)]
    assert len(tables["ranks"]) == 3 * 6
    assert all(row["busy_seconds"] > 0 for row in tables["ranks"])
    assert any(row["verb"] == "start-run" for row in tables["events"])
    assert unknown.returncode == 3 and unknown.stderr.count("\n") == 1


def test_a_cluster_file_without_simulated_nodes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[nodes.a]\naddress = "tcp://127.0.0.1:7077"\n')
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "simulate", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 2 and "nodes.NAME.simulated" in done.stderr and done.stderr.count("\n") == 1


def test_more_nodes_than_can_train_here_are_refused_without_a_simulation() -> None:
    done = trainctl("demo", "--headless", "--nodes=16")
    assert done.returncode == 2
    assert "--simulated" in done.stderr and done.stderr.count("\n") == 1
