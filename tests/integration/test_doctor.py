"""The doctor and discovery against real agents: what they find of nodes, of files that differ, of one that is gone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import SHARED_PIDS
from tests.integration.conftest import AgentProcess
from tests.integration.support.known_run import make_known, run_file
from tests.integration.support.ports import free_addresses
from tests.tui.support.cli_calls import call, call_json
from tests.waiting import HANG_SECONDS

from trainctl.protocol.messages import DigestsRequest, DiskRequest
from trainctl.protocol.messages.base import PROTOCOL_VERSION


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a cluster file, and the agents of two of its three nodes; gamma's has never run."""
    folder = tmp_path_factory.mktemp("doctor")
    names = ("alpha", "beta", "gamma")
    addresses = dict(zip(names, free_addresses(len(names)), strict=True))
    tables = [f'[nodes.{name}]\naddress = "{at}"\n' for name, at in addresses.items()]
    (folder / "cluster.toml").write_text("".join(tables))
    nodes = f'[nodes.alpha]\n[nodes.beta]\nmodel_path = "{folder}/copy"\n'
    text = run_file(folder, nodes=nodes, name="sft")
    (folder / "run.toml").write_text(text)
    own = text.replace("[nodes.alpha]", f'[nodes.alpha]\ncache_path = "{folder}/new"')
    make_known(folder / "state" / "alpha", "one", own)
    other = own.replace(f"{folder}/new", f"{folder}/no/new").replace(f'"{folder}/model"', '"org/not-cached"')
    make_known(folder / "state" / "alpha", "two", other)
    agents = [AgentProcess(folder / "state", name, folder / "cluster.toml").start() for name in names[:2]]
    SHARED_PIDS.update(agent.process.pid for agent in agents if agent.process is not None)
    yield folder, agents
    for agent in agents:
        agent.clean_up()


def write(folder: Path, **files: str) -> None:
    """model, copy and data, each of one text; the model is no tensor file: digests don't care."""
    for name in ("model", "copy", "data"):
        (folder / name).mkdir(exist_ok=True)
    for name in ("model", "copy"):
        (folder / name / "config.json").write_text("{}")
        (folder / name / "model.safetensors").write_text(files.get(name, "weights"))
    (folder / "data" / "a.txt").write_text("text")


def test_files_of_all_nodes_are_compared_and_a_change_is_seen(pair: Any) -> None:
    folder, _ = pair
    write(folder)
    found = call_json("doctor", folder / "run.toml", "--cluster", folder / "cluster.toml", status=3)
    fails = [one for one in found["findings"] if one["level"] == "fail"]
    assert [(one["node"], one["subject"]) for one in fails] == [("gamma", "reach")], fails
    assert "trainctl-agent run --name gamma" in fails[0]["do"]
    same = {one["subject"] for one in found["findings"] if one["text"].startswith("identical on alpha, beta")}
    assert same == {"model", "data"}
    write(folder, copy="other weights")
    found = call_json("doctor", folder / "run.toml", "--cluster", folder / "cluster.toml", status=3)
    (model,) = [one for one in found["findings"] if one["subject"] == "model" and one["level"] == "fail"]
    assert model["node"] == "beta" and "model.safetensors" in model["text"]
    assert model["do"] == f"on beta: rsync -av --checksum {folder}/model/ {folder}/copy/"


@pytest.mark.tier("test")
def test_one_agent_that_is_well_is_exit_code_0(pair: Any) -> None:
    _, (alpha, _) = pair
    done = call("doctor", "--connect", alpha.address)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"ok    alpha: reach: {alpha.address} answers in ")
    assert lines[-1].startswith("0 fail, ")
    assert json.loads(call("doctor", "--connect", alpha.address, "--json").stdout)["counts"]["fail"] == 0


def test_digests_are_of_models_and_data_alone(pair: Any) -> None:
    folder, (alpha, _) = pair
    write(folder)
    (folder / "model" / "secret").write_text("not ours to read")
    with alpha.client() as client:
        files = client.ask(DigestsRequest, "model", str(folder / "model")).files
        assert [file.name for file in files] == ["config.json", "model.safetensors"]
        assert client.ask(DigestsRequest, "model", "org/not-cached").problem == "not in the Hugging Face cache"
        (folder / "model" / "config.json").unlink()
        assert "no such file" in client.ask(DigestsRequest, "model", str(folder / "model")).problem.lower()
        for path in ("model", f"{folder}/data/../model", "/etc/shadow", "/dev/zero", "org/other", str(folder)):
            for what in ("model", "data"):
                reply = client.ask(DigestsRequest, what, path)
                assert (reply.digest, reply.files, reply.named) == ("", (), False)
            disk = client.ask(DiskRequest, path)
            assert (disk.write_bytes_per_second, disk.named) == (None, False)


def test_the_disk_of_token_caches_is_measured(pair: Any) -> None:
    folder, (alpha, _) = pair
    with alpha.client() as client:
        own, new = client.ask(DiskRequest), client.ask(DiskRequest, str(folder / "new"))
        assert own.write_bytes_per_second > 0 and own.read_bytes_per_second != 0
        assert (new.folder, new.problem, (folder / "new").exists()) == (str(folder), "", False)
        assert "No such file" in client.ask(DiskRequest, str(folder / "no" / "new")).problem


@pytest.mark.tier("test")
def test_an_agent_that_advertises_itself_is_found(tmp_path: Path) -> None:
    (address,) = free_addresses(1)
    file = tmp_path / "cluster.toml"
    file.write_text(f'advertise = true\n[nodes.loud]\naddress = "{address}"\n')
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", "--no-keys", "--name", "loud"]
    command += ["--cluster", str(file)]
    with subprocess.Popen([*command, "--state", str(tmp_path)], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None and agent.stdout.readline()
            for _ in range(10):
                found = call_json("cluster", "discover", "--cluster", file, "--seconds", "2")["found"]
                mine = [one for one in found if one["node"] == "loud"]
                if mine:
                    break
            (told,) = mine
            assert (told["address"], told["standing"]) == (address, "in the cluster file")
            assert told["protocol"] == str(PROTOCOL_VERSION)
        finally:
            agent.terminate()
            assert agent.wait(HANG_SECONDS) == 0
