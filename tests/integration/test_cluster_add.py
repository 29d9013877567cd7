"""`trainctl cluster add` against a real sshd on loopback: from nothing but Python there to an agent that answers."""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.conftest import SHARED_PIDS
from tests.integration.support.ports import free_addresses
from tests.integration.support.sshd import PYTHON, LoopbackSshd
from tests.tui.support.cli_calls import assert_one_line, call, call_json
from tests.waiting import HANG_SECONDS

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.config import cluster_file
from trainctl.protocol.messages import FactsRequest, SnapshotRequest
from trainctl.protocol.security import keys
from trainctl.protocol.security.keyring import Keyring
from trainctl.trainer import demo_assets
from trainctl.tui.setup import remote_install, remote_side

pytestmark = pytest.mark.needs("sshd")


class Pair:
    """This machine's files, the other's behind sshd, and the command that adds the other."""

    def __init__(self, folder: Path, sshd: LoopbackSshd) -> None:
        self.sshd, self.folder = sshd, folder
        self.file = folder / "here" / "cluster.toml"
        self.file.parent.mkdir()
        here, self.address = free_addresses(2)
        self.file.write_text(f'# mine\n[nodes.home]\naddress = "{here}"\n')
        self.env = {"TRAINCTL_CLUSTER": str(self.file), "TRAINCTL_KEYS": str(folder / "here" / "keys")}

    def words(self, **changes: str) -> list[str]:
        given = {
            "--name": "away", "--address": self.address, "--here": "home", "--python": PYTHON, "--extras": "none",
            "--pip-args": "--no-deps --no-index", "--ssh-config": str(self.sshd.config), **changes,
        }  # fmt: skip
        return ["cluster", "add", "there", *(word for pair in given.items() for word in pair)]

    @property
    def added(self) -> Path:
        return self.file.parent / "cluster.d"

    def client(self) -> BlockingClient:
        folder = keys.KeyFolder(Path(self.env["TRAINCTL_KEYS"]))
        return BlockingClient(
            self.address, keys=Keyring(folder, cluster_file.read(self.file)), timeout_seconds=HANG_SECONDS
        )


def in_folder(folder: Path) -> cluster_file.Cluster:
    """The cluster of a machine that has no cluster.toml of its own, only added nodes."""
    (folder / "empty.toml").touch()
    return cluster_file.read(folder / "empty.toml")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("add")
    with LoopbackSshd(folder / "there") as sshd:
        SHARED_PIDS.add(sshd.pid)
        made = Pair(folder, sshd)
        yield made
        for note in sshd.home.glob("state/trainctl/*/detached.toml"):
            process = remote_side.running(note)
            if process is not None:
                process.terminate()
                process.wait(HANG_SECONDS)


class Calls(NamedTuple):
    """The outputs of the first and the second call, and whether the second left the agent that the first started."""

    first: dict[str, Any]
    second: dict[str, Any]
    same_agent: bool


@pytest.fixture(scope="module")
def calls(pair: Pair) -> Calls:
    """One after the other, before any test has one fail."""
    first = call_json(*pair.words(), **pair.env)
    note = pair.sshd.home / "state" / "trainctl" / "away" / "detached.toml"
    process, before = remote_side.running(note), note.read_bytes()
    assert process is not None, "it was started by itself"
    SHARED_PIDS.update(each.pid for each in (process, *process.children()))  # its supervisor, and the agent
    second = call_json(*pair.words(), **pair.env)
    return Calls(first, second, note.read_bytes() == before and process.is_running())


@pytest.fixture
def first(calls: Calls) -> dict[str, Any]:
    return calls.first


def test_a_machine_with_python_alone_becomes_a_node_that_answers(pair: Pair, first: dict[str, Any]) -> None:
    assert [(step["name"], step["changed"]) for step in first["steps"]] == [
        ("connect", False), ("install", True), ("keys here", True), ("keys there", True), ("start", True),
        ("link", False), ("nodes here", True),
    ]  # fmt: skip
    assert 0 < first["round_trip_seconds"] < 5
    assert first["stream_bytes_per_second"] > 1e6
    assert first["sent_bytes_per_second"] > 1e6
    assert "at once (one TCP connection)" in first["steps"][5]["text"]
    with pair.client() as client:
        assert client.ask(SnapshotRequest, 0).node.node == "away"
        assert client.ask(FactsRequest).keys_folder.startswith(str(pair.sshd.home)), (
            "it runs from what was installed there"
        )


def test_keys_are_paired_both_ways_and_the_person_s_file_is_left(pair: Pair, first: dict[str, Any]) -> None:
    config = pair.sshd.home / "config" / "trainctl"
    ours, theirs = keys.KeyFolder(Path(pair.env["TRAINCTL_KEYS"])), keys.KeyFolder(config / "keys")
    here, away = cluster_file.read(pair.file), in_folder(config)
    assert here.nodes["away"].key == away.nodes["away"].key == theirs.agent().public
    assert away.nodes["home"].key == ours.agent().public
    assert (here.nodes["away"].ssh, away.nodes["home"].ssh) == ("there", "")
    found = theirs.authorized().find(ours.user().public)
    assert found is not None and found[1].role == "operator"
    assert pair.file.read_text().startswith("# mine\n[nodes.home]")
    assert sorted(file.name for file in pair.added.iterdir()) == ["away.toml"]
    secret = [file for file in pair.sshd.home.rglob("*.toml") if ours.agent().secret in file.read_text()]
    assert secret == [], "a secret never leaves its machine"


def test_a_second_call_finds_all_of_it_done(calls: Calls) -> None:
    assert [step["changed"] for step in calls.second["steps"]] == [False] * 7, calls.second["steps"]
    assert calls.same_agent


def test_each_failure_names_its_step_and_leaves_nothing_here(pair: Pair, first: dict[str, Any], tmp_path: Path) -> None:
    env = {"TRAINCTL_CLUSTER": str(tmp_path / "cluster.toml"), "TRAINCTL_KEYS": str(tmp_path / "keys")}
    (tmp_path / "cluster.toml").write_text('[nodes.home]\naddress = "tcp://127.0.0.1:1"\n')
    for status, says, changes in (
        (3, "connect: no Python 3.11 or newer there (looked for /no/python)", {"--python": "/no/python"}),
        (2, "--here: no node 'nowhere'", {"--here": "nowhere"}),
        (2, "--name: 'home' is this machine's own name", {"--name": "home"}),
        (2, "an address must be tcp://host:port", {"--address": "away"}),
        (3, "keys there: ", {"--address": "tcp://127.0.0.1:2"}),
        (3, "install (pip): ", {"--pip-args": "--no-such-option"}),
    ):
        done = call(*pair.words(**changes), **env)
        assert done.returncode == status, done.stdout + done.stderr
        assert done.stderr.startswith("trainctl: ") and done.stderr.count("\n") == 1, done.stderr
        assert says in done.stderr
        assert not (tmp_path / "cluster.d").exists()
    config = tmp_path / "ssh_config"
    config.write_text(pair.sshd.config.read_text().replace("user_key", "host_key"))
    assert_one_line(call(*pair.words(**{"--ssh-config": str(config)}), **env), 5, "connect: ", "Permission denied")
    assert_one_line(call("cluster", "add", "-oProxyCommand=x", **env), 2, "")


def test_sync_uses_the_name_and_the_program_of_add(pair: Pair, first: dict[str, Any], tmp_path: Path) -> None:
    demo_assets.make_model(tmp_path / "model", demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64))
    (tmp_path / "a.txt").write_text("some text " * 200)
    (tmp_path / "run.toml").write_text(
        f'[run]\nname = "a"\nsteps = 9\n[model]\npath = "model"\n[data]\npath = "a.txt"\ntokenizer = "bytes"\n'
        f"sequence_length = 64\n[batch]\nglobal = 2\nmicro = 1\n[optimizer]\nlearning_rate = 1e-3\n[nodes.home]\n"
        f'[nodes.away]\nmodel_path = "{tmp_path}/there"\n'
    )
    words = ["cluster", "sync", tmp_path / "run.toml", "--here", "home", "--ssh-config", pair.sshd.config, "--dry-run"]
    model, data = call_json(*words, **pair.env)["nodes"]["away"]
    assert (model["state"], model["folder"]) == ("to-copy", f"{tmp_path}/there")
    assert (data["state"], data["folder"]) == ("complete", str(tmp_path)), "it sees the same file"


def test_list_and_remove(pair: Pair, first: dict[str, Any]) -> None:
    nodes = call_json("cluster", "list", **pair.env)["nodes"]
    assert [(one["node"], one["file"]) for one in nodes] == [
        ("home", str(pair.file)), ("away", str(pair.added / "away.toml"))
    ]  # fmt: skip
    assert nodes[1]["fingerprint"].startswith("SHA256:")
    kept = (pair.added / "away.toml").read_bytes()
    assert_one_line(call("cluster", "remove", "home", **pair.env), 2, "from that file yourself")
    assert_one_line(call("cluster", "remove", "nobody", **pair.env), 2, "no node 'nobody'")
    assert call("cluster", "remove", "away", **pair.env).returncode == 0
    assert not (pair.added / "away.toml").exists()
    (pair.added / "away.toml").write_bytes(kept)


def test_the_wheel_is_the_same_each_time_and_whole() -> None:
    built = remote_install.build_wheel()
    assert built.digest == remote_install.build_wheel().digest
    with zipfile.ZipFile(io.BytesIO(built.body)) as archive:
        names = archive.namelist()
        record = archive.read(next(name for name in names if name.endswith("/RECORD"))).decode()
    assert sorted(line.split(",")[0] for line in record.splitlines()) == sorted(names)
    assert {name.split("/")[1] for name in names if name.startswith("trainctl/")} == set(remote_install.PACKAGES)
    assert {f"trainctl/{room}/py.typed" for room in remote_install.PACKAGES} <= set(names)
    assert not any("__pycache__" in name for name in names)
