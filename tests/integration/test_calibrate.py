"""`trainctl calibrate` with a real agent: the table, the stored profile, the rank that it fits, and who may not."""

import re
from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.cluster.run_files import on, on_mlx
from tests.cluster.waits import wait_for_end
from tests.integration.conftest import AgentProcess
from tests.integration.support.ports import free_addresses
from tests.tui.support.cli_calls import assert_one_line, call, call_json, call_process
from tests.waiting import until

from trainctl.protocol.calibration.peak import peak
from trainctl.protocol.calibration.profile import all_profiles
from trainctl.protocol.config import cluster_file
from trainctl.protocol.messages import CalibrateRequest, CalibrationsRequest, SnapshotRequest
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import KeyFolder


@pytest.fixture
def run_toml(run_config, tmp_path):
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(run_config()).encode())
    return tmp_path / "run.toml"


def calibrate(agent, *words):
    return call("calibrate", *words, "--connect", agent.address)


def test_a_node_is_calibrated_and_its_ranks_have_the_profile(agent, run_toml, run_config):
    assert_one_line(calibrate(agent), 3, "no run yet")
    done = calibrate(agent, run_toml)
    assert done.returncode == 0, done.stderr
    assert " peak\n" in done.stdout
    assert re.search(r"float32 products +[0-9.e+]+ GFLOPS", done.stdout)
    (profile,) = all_profiles(agent.directory / "profiles")
    assert all(f"micro-batch {one.micro}: " in done.stderr for one in profile.passes)  # one alone, on a busy machine
    advice = call_json("advise", run_toml, "--connect", agent.address)
    assert not advice["unknown"]
    assert (advice["answer"]["mode"], advice["answer"]["source"]) == ("alone", "measured")
    assert 0 < advice["answer"]["samples_per_second"] <= 1.5 * max(one.rate for one in profile.passes)
    assert advice["nodes"][agent.name]["calibrated_at"] == profile.created_at
    assert f"{peak(profile.passes).micro:,} " in next(line for line in done.stdout.splitlines() if "peak" in line)
    micro = min(12, profile.passes[-1].micro)  # on a busy machine larger ones aren't measured
    with agent.client() as client:
        client.send("start-run", {"config": run_config(batch__micro=micro)}, wait="accepted")
        view = wait_for_end(client)
        (kept,) = client._run(client._client.ask(CalibrationsRequest)).profiles
        (part,) = client.ask(SnapshotRequest, 0).rank_steps
    assert view.state == "finished"
    assert 0 < part.values["matmul_use"] < 1.5
    assert 0 < part.values["calibrated_speed"] < 100
    assert msgspec.structs.replace(kept, passes=profile.passes) == profile
    calibrated = {known.micro: known.seconds for known in profile.passes}
    assert all(known.seconds <= calibrated.get(known.micro, known.seconds) for known in kept.passes)  # or run faster
    assert not [*agent.directory.glob("calibration-*")]


def test_a_training_node_is_not_calibrated_and_a_calibrated_node_does_not_train(agent, run_toml, run_config):
    with agent.client() as client:
        client.send("start-run", {"config": run_config(run__steps=100_000)}, wait="applied")
        assert_one_line(calibrate(agent, run_toml), 3, "takes part in", "stop the run")
        client.send("stop", {"checkpoint": False}, wait="accepted")
        wait_for_end(client)
        until(lambda: not agent.trainer_pids(), 20, "the trainer's end")
        begun = client._run(client._client.ask(CalibrateRequest, "calibration-abcd", run_config()))
        assert begun.state == "running"
        refused = client.send("start-run", {"config": run_config()})
        assert refused.state == "rejected"
        assert "calibration is in progress" in refused.reason


def test_what_can_not_be_calibrated_is_one_line(agent, tmp_path, run_config):
    config = run_config(model__path=str(tmp_path / "nowhere"))
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(config).encode())
    assert_one_line(calibrate(agent, tmp_path / "run.toml"), 2, "model.path")
    assert_one_line(calibrate(agent, "--node", "elsewhere"), 2, "--node")


def test_a_run_waits_for_no_calibration_and_takes_the_micro_batch_of_a_profile(agent, run_toml, run_config):
    config = run_config(batch__micro="auto", run__steps=12, nodes=on_mlx(agent.name))
    run_toml.write_bytes(tomli_w.dumps(config).encode())
    with agent.client() as client:
        begun = call_process("run", run_toml, "--connect", agent.address)
        assert begun.returncode == 0 and "calibrat" not in begun.stderr, begun.stderr
        first = wait_for_end(client)
        with RecordReader(Path(first.directory)) as reader:
            sizes = [part.micro_batch for part in reader.parts_between(1, 12)]
        assert client._run(client._client.ask(CalibrationsRequest)).profiles == ()
        assert calibrate(agent, run_toml).returncode == 0
        (profile,) = client._run(client._client.ask(CalibrationsRequest)).profiles
        client.send("start-run", {"config": config}, wait="accepted")
        second = wait_for_end(client)
    assert (first.state, second.state) == ("finished", "finished")
    assert sizes[:4] == [2, 2, 2, 2] and max(sizes) > 2, "the first steps look for the fastest"
    assert second.ranks[0].micro_batch == min(12, peak(profile.passes, 12).micro)


@pytest.fixture
def pair(tmp_path):
    """Two agents of one cluster that let nobody in without keys, and the folder of a person who may command both."""
    folders = {node: KeyFolder(tmp_path / "keys" / node) for node in ("alpha", "beta")}
    tables = {}
    for (node, folder), address in zip(folders.items(), free_addresses(2), strict=True):
        folder.make(node)
        tables[node] = {"address": address, "key": folder.agent().public}
    folders["beta"].authorize("anna", folders["alpha"].user().public, "operator")
    file = tmp_path / "cluster.toml"
    file.write_bytes(tomli_w.dumps({"nodes": tables}).encode())
    agents = [AgentProcess(tmp_path / "state", node, file, folder.path) for node, folder in folders.items()]
    try:
        yield file, folders["alpha"], [agent.start() for agent in agents]
    finally:
        for agent in agents:
            agent.clean_up()


def test_nodes_of_a_machine_are_calibrated_at_once_and_sums_are_compared_with_the_link(pair, tmp_path, run_config):
    file, person, (alpha, beta) = pair
    even, slow = {"first_shares": "even"}, {"seconds": 150}  # on a busy machine
    nodes = on("alpha", "beta", beta={"backend": "mlx"})
    config = run_config(nodes=nodes, run__steps=100_000, group=even, calibration=slow)
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(config).encode())
    words = ("calibrate", tmp_path / "run.toml", "--cluster", file)
    mine = {"TRAINCTL_KEYS": str(person.path)}
    profiles = {node: found["profile"] for node, found in call_json(*words, **mine)["nodes"].items()}
    assert {node: found["beside"] for node, found in profiles.items()} == {"alpha": ["beta"], "beta": ["alpha"]}
    assert all(found["matmul"] and found["forward"] for found in profiles.values())
    (link,) = profiles["beta"]["links"]
    assert profiles["alpha"]["links"] == []
    assert link["peer"] == "alpha"
    assert min(link["sent_bytes_per_second"], link["received_bytes_per_second"]) > 1e5
    assert 0 < link["latency_seconds"] < 1
    (profile,) = all_profiles(beta.directory / "profiles")
    assert [one.peer for one in profile.links] == ["alpha"]
    with alpha.client(keys=Keyring(person, cluster_file.read(file))) as client:
        until(lambda: all(peer.state == "connected" for peer in client.ask(SnapshotRequest, 0).peers), 20, "beta")
        assert client.send("start-run", {"config": config}).state == "applied"
        parts = until(lambda: _with_link_use(client), 60, "a step of both ranks")
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    assert all(part.values["link_use"] > 0 for part in parts)


def test_a_lead_that_trains_leaves_the_link_out(pair, tmp_path, run_config):
    file, person, (alpha, beta) = pair
    mine = {"TRAINCTL_KEYS": str(person.path)}
    config = run_config(nodes=on_mlx("alpha"), run__steps=100_000)
    (tmp_path / "run.toml").write_bytes(tomli_w.dumps(run_config(nodes=on_mlx("beta"))).encode())
    with alpha.client(keys=Keyring(person, cluster_file.read(file))) as client:
        assert client.send("start-run", {"config": config}).state == "applied"
        assert client.send("pause", {}).state == "applied"  # its steps take the CPU from what is measured
        done = call("calibrate", tmp_path / "run.toml", "--cluster", file, **mine)
        client.send("stop", {"checkpoint": False})
        wait_for_end(client)
    assert done.returncode == 0, done.stderr
    assert "beta: link to alpha: not measured: alpha takes part in a run" in done.stderr
    assert "link to" not in done.stdout
    (profile,) = all_profiles(beta.directory / "profiles")
    assert profile.links == ()


def _with_link_use(client):
    """The newest step's parts, once they have been compared with the links."""
    parts = client.ask(SnapshotRequest, 0).rank_steps
    return parts if len(parts) == 2 and all("link_use" in part.values for part in parts) else ()
