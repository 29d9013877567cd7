"""The demo as a newcomer runs it, real or simulated: one command, one JSON object, and nothing left behind."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.asking import run_of
from tests.conftest import ROOT
from tests.lacking import lacks
from tests.tui.support.cli_calls import ENVIRONMENT, assert_none_left, call, call_json, end_all, started
from tests.tui.support.simulated_cluster import simulated_cluster
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file
from trainctl.protocol.messages import SnapshotRequest
from trainctl.protocol.record.reader import RecordReader
from trainctl.tui.demo import agents

STEPS = 8
TOKENS_PER_STEP = 24 * 128
STEER = ROOT / "examples" / "nodejs" / "steer.mjs"
SHARES = {"torch-a": 12, "torch-b": 10, "mlx-c": 2}


class Shown:
    """A demo that has ended, and what the Node.js example said and did while it trained; None where there is none."""

    def __init__(self, folder: Path) -> None:
        own = {"TRAINCTL_STATE": str(folder / "state")}  # no agent of another test's is found there
        words = ["demo", "--folder", folder, "--headless", "--steps", str(STEPS), "--json"]
        with started(*words, env=ENVIRONMENT | own) as process:
            assert process.stderr is not None
            said = [next(line for line in iter(process.stderr.readline, "") if "step 2 " in line)]
            (self.cluster,) = folder.glob("demo-*/cluster.toml")
            address = next(iter(cluster_file.read(self.cluster).nodes.values())).address
            # Paused, so that the run doesn't end before both have started: on a busy machine that takes long.
            with BlockingClient(address, by="tester", timeout_seconds=HANG_SECONDS) as client:
                assert client.send("pause", {}).state == "applied"
                self.seen = call("status", "--json", **own)
                self.steered = self._steer(address) if not lacks("nodejs") else None
                assert client.send("resume", {}).state == "applied"
            self.out, err = process.communicate(timeout=HANG_SECONDS)
        self.err, self.status = "".join([*said, err]), process.returncode

    def _steer(self, address: str) -> subprocess.CompletedProcess:
        words = ["node", str(STEER), "--answer", "60", "--connect", address]
        words += [f"{node}={share}" for node, share in SHARES.items()]
        return subprocess.run(words, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


@pytest.fixture(scope="module")
def shown(tmp_path_factory) -> Iterator[Shown]:
    folder = tmp_path_factory.mktemp("shown")
    try:
        yield Shown(folder)
        assert_none_left(folder)
    finally:
        end_all(folder)


@pytest.mark.tier("test")
def test_the_headless_demo_trains_one_model_on_torch_and_mlx_and_prints_one_object(shown):
    assert shown.status == 0, shown.err
    result = json.loads(shown.out)
    assert (result["steps"], result["state"], result["mixed"]) == (STEPS, "finished", True)
    assert 5.3 < result["first_loss"] < 5.7
    assert result["last_loss"] < result["first_loss"] - 0.5
    assert result["engine"] in ("gloo", "ring")
    assert [(node["name"], node["backend"]) for node in result["nodes"]] == [
        ("torch-a", "torch"),
        ("torch-b", "torch"),
        ("mlx-c", "mlx"),
    ]
    assert min(node["tokens"] for node in result["nodes"]) > 0
    assert sum(node["tokens"] for node in result["nodes"]) == STEPS * TOKENS_PER_STEP
    assert sum(node["share"] for node in result["nodes"]) == 24
    assert result["tokens_per_second"] > 0
    assert list(cluster_file.read(shown.cluster).nodes) == ["torch-a", "torch-b", "mlx-c"]
    assert Path(result["run_directory"]).is_dir()
    assert "Traceback" not in shown.err


def test_a_second_terminal_finds_the_running_demo_by_itself(shown):
    assert shown.seen.returncode == 0, shown.seen.stderr
    found = json.loads(shown.seen.stdout)
    assert found["run"]["run"] == json.loads(shown.out)["run"]


@pytest.mark.needs("nodejs")
def test_the_nodejs_example_steers_the_live_demo(shown):
    steered = shown.steered
    assert (steered.returncode, steered.stderr) == (0, "")
    head, *ranks, last = steered.stdout.splitlines()
    assert re.fullmatch(rf"demo-\S+ paused, step \d+/{STEPS}, plan \d+, batch 24", head)
    assert [line.split()[0] for line in ranks] == ["torch-a", "torch-b", "mlx-c"]
    applied = re.match(r"rebalance applied at step (\d+): ", last)
    assert applied and 2 < int(applied[1]) <= STEPS
    assert {node["name"]: node["share"] for node in json.loads(shown.out)["nodes"]} == SHARES


@pytest.mark.tier("test")
def test_the_dpo_demo_trains_adapters_on_torch_and_mlx_and_evaluates_held_out_pairs(shown, tmp_path):
    for name in ("model", "data"):  # made by the first demo
        (tmp_path / name).symlink_to(shown.cluster.parents[1] / name)
    words = ("demo", "--folder", tmp_path, "--headless", "--objective", "dpo", "--nodes", "2", "--steps", "2")
    try:
        result = call_json(*words, TRAINCTL_STATE=str(tmp_path / "state"))
        assert_none_left(tmp_path)
    finally:
        end_all(tmp_path)
    assert (result["steps"], result["state"], result["mixed"]) == (2, "finished", True)
    assert [node["backend"] for node in result["nodes"]] == ["torch", "mlx"]
    assert result["first_loss"] == pytest.approx(math.log(2), abs=1e-3), "at first the model is its own reference"
    with RecordReader(Path(result["run_directory"])) as record:
        (evaluated,) = record.held_out_pairs(5)
    assert all(pair.prompt and pair.chosen_text and pair.rejected_text for pair in evaluated.pairs)
    assert any(pair.margin for pair in evaluated.pairs)


def trainctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "trainctl.tui.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)


def test_a_simulated_demo_is_seen_to_its_end_and_leaves_its_record(tmp_path: Path) -> None:
    done = trainctl("demo", "--simulated", "--json", "--nodes=3", "--steps=4", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] and found["simulated"] and found["state"] == "finished" and found["steps"] == 4
    assert [node["name"] for node in found["nodes"]] == [*agents.nodes(3)]
    assert "no model was trained" in done.stderr
    listed = trainctl("export", found["run_directory"], "--what", "steps", "--format=jsonl")
    assert len(listed.stdout.splitlines()) == 4, listed.stderr


def test_a_simulated_run_is_steered_loses_a_trainer_and_takes_it_back(tmp_path: Path) -> None:
    """Each command is applied at a step; the trainer that dies comes back into the group."""
    last = [*agents.nodes(2)][-1]
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
        until(lambda: view().step > agents.DEATH_STEP and view().generation.n > 1, HANG_SECONDS, "the death")
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
