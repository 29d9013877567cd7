"""`trainctl cluster sync` against a real sshd and rsync on loopback: model and data reach the node that lacks them."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import SHARED_PIDS
from tests.integration.support.ports import free_addresses
from tests.integration.support.sshd import PYTHON, LoopbackSshd
from tests.tui.support.cli_calls import assert_one_line, call, call_json, interrupt, started
from tests.waiting import until

from trainctl.protocol.config.data_files import PARTIAL_FOLDER
from trainctl.trainer import demo_assets

pytestmark = [pytest.mark.needs("sshd"), pytest.mark.needs("rsync")]
REVISION = "0123abcd"
TEXT_BYTES = 3_000_000


class Sync:
    """A run of this machine and another one behind sshd, and how its files are copied there."""

    def __init__(self, folder: Path, sshd: LoopbackSshd) -> None:
        self.sshd, self.here, self.there = sshd, folder / "here", folder / "the other [one]"
        here, away, lost = free_addresses(3)  # nothing listens there
        self.model, self.data = self.here / "model", self.here / "some data"
        shape = demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64)
        demo_assets.make_model(self.model, shape)
        (self.model / ".env").write_text("SECRET=1")
        (self.data / "deep *").mkdir(parents=True)
        (self.data / "deep *" / "a b.txt").write_text(random.Random(1).randbytes(TEXT_BYTES // 2).hex())
        (self.data / "c.txt").write_text("some text " * 100)
        (self.data / "notes.md").write_text("not data")
        self.cluster = self.here / "cluster.toml"
        self.cluster.write_text(
            f'[nodes.home]\naddress = "{here}"\n[nodes.away]\naddress = "{away}"\nssh = "there"\n'
            f'[nodes.lost]\naddress = "{lost}"\nssh = "lost"\n'
        )
        self.config = self.here / "ssh config"
        self.config.write_text(
            f"{sshd.config.read_text()}Host lost\n  HostName 127.0.0.1\n  Port {lost.rpartition(':')[2]}\n"
        )
        self.file = self.write("run.toml", self.model, "away")

    def write(self, name: str, model: str | Path, *others: str) -> Path:
        """A run file whose nodes other than this machine have their own paths."""
        own = f'model_path = "{self.there}/model"\n' if isinstance(model, Path) else ""
        nodes = "".join(f'[nodes.{node}]\n{own}data_path = "{self.there}/data"\n' for node in others)
        file = self.here / name
        file.write_text(
            f'[run]\nname = "a"\nsteps = 9\n[model]\npath = "{model}"\n[data]\npath = "{self.data}"\n'
            f'tokenizer = "bytes"\nsequence_length = 64\n[batch]\nglobal = 4\nmicro = 2\n'
            f"[optimizer]\nlearning_rate = 1e-3\n[nodes.home]\n{nodes}"
        )
        return file

    def words(self, file: Path | None = None) -> list[str]:
        given = {
            "--cluster": str(self.cluster), "--here": "home", "--python": PYTHON,
            "--ssh-config": str(self.config),
        }  # fmt: skip
        return ["cluster", "sync", str(file or self.file), *(word for pair in given.items() for word in pair)]


@pytest.fixture(scope="module")
def sync(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sync]:
    folder = tmp_path_factory.mktemp("sync")
    with LoopbackSshd(folder / "sshd") as sshd:
        SHARED_PIDS.add(sshd.pid)
        yield Sync(folder, sshd)


@pytest.fixture
def empty(sync: Sync) -> Sync:
    """Nothing there yet."""
    shutil.rmtree(sync.there, ignore_errors=True)
    return sync


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_files_are_copied_resumed_and_then_left_alone(empty: Sync) -> None:
    shown = call_json(*empty.words(), "--dry-run")["nodes"]["away"]
    assert [(one["what"], one["state"]) for one in shown] == [("model", "to-copy"), ("data", "to-copy")]
    assert shown[1]["bytes"] == TEXT_BYTES + 1000 and not empty.there.exists()

    deep = empty.there / "data" / "deep *"
    with started(*empty.words(), "--limit", "0.5") as process:
        until(lambda: any(file.stat().st_size for file in deep.glob(".a b.txt.*")), what="a part of the file there")
        said = interrupt(process)
    assert process.returncode == 130 and "to copy the rest, run this again" in said[1], said
    until((deep / PARTIAL_FOLDER / "a b.txt").is_file, what="the part that is kept")
    assert not (deep / "a b.txt").exists(), "no file has its name before it is complete"

    model, data = call_json(*empty.words())["nodes"]["away"]
    assert (model["state"], data["state"]) == ("complete", "copied")
    assert 0 < data["sent_bytes"] < TEXT_BYTES, "the first part isn't sent again"
    expected = {name: body for name, body in files_of(empty.data).items() if name != "notes.md"}
    assert files_of(empty.there / "data") == expected
    assert files_of(empty.there / "model") == {
        name: body for name, body in files_of(empty.model).items() if name != ".env"
    }

    before = {file: file.stat().st_mtime_ns for file in empty.there.rglob("*")}
    done = call(*empty.words())
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"ok    away: model: already in {empty.there}/model", f"ok    away: data: already in {empty.there}/data"
    ]  # fmt: skip
    assert {file: file.stat().st_mtime_ns for file in empty.there.rglob("*")} == before


def test_a_model_of_the_hub_cache_reaches_the_cache_there(empty: Sync, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = empty.here / "cache"
    cached = cache / "models--org--tiny"
    (cached / "blobs").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(REVISION)
    snapshot = cached / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(empty.model / name, cached / "blobs" / name)
        (snapshot / name).symlink_to(cached / "blobs" / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    file = empty.write("hub.toml", "org/tiny", "away")
    model, _ = call_json(*empty.words(file))["nodes"]["away"]
    there = empty.sshd.home / ".cache" / "huggingface" / "hub" / "models--org--tiny"
    assert (model["state"], model["folder"]) == ("copied", str(there / "snapshots" / REVISION))
    assert files_of(there / "snapshots" / REVISION) == files_of(snapshot)
    assert (there / "refs" / "main").read_text() == REVISION
    assert call_json(*empty.words(file))["nodes"]["away"][0]["state"] == "complete"


def test_what_is_wrong_there_is_one_line_and_the_other_nodes_are_served(
    empty: Sync, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "rsync"
    victim = empty.there / "model" / "config.json"
    program.write_text(f"#!/bin/sh\n{shutil.which('rsync')} \"$@\"; status=$?\n[ -f '{victim}' ] && "
                       f"printf X | dd of='{victim}' bs=1 conv=notrunc 2>/dev/null\nexit $status\n")  # fmt: skip
    program.chmod(0o755)
    (empty.there / "data").mkdir(parents=True)
    (empty.there / "data" / "more.txt").write_text("only there")
    with monkeypatch.context() as patched:
        patched.setenv("PATH", str(tmp_path), prepend=":")  # a disk that changes what is written
        done = call(*empty.words(empty.write("two.toml", empty.model, "lost", "away")))
    assert done.returncode == 3
    lost, model, data, summary = done.stderr.splitlines()
    assert lost.startswith("trainctl: lost: ssh: ") and "Connection refused" in lost
    assert f"away: model: config.json in {empty.there}/model differs from this machine's file after copying" in model
    assert f"away: data: more.txt in {empty.there}/data isn't on this machine" in data
    assert summary == "trainctl: 2 of 2 nodes failed: lost, away"


def test_bad_input_is_one_line(empty: Sync, tmp_path: Path) -> None:
    words = empty.words()
    assert_one_line(call(*words, "--node", "home"), 2, "--node: home is this machine")
    assert_one_line(call(*words, "--node", "nowhere"), 2, "--node: no node 'nowhere'")
    assert_one_line(call(*words, "--ssh", "away"), 2, "--ssh: 'away' must have the form NODE=USER@HOST")
    assert_one_line(call(*words, "--here", "mars"), 2, "--here: no node 'mars'")
    assert_one_line(call(*words, PATH=str(tmp_path)), 2, "rsync: not installed")
    env = {"TRAINCTL_CLUSTER": str(tmp_path / "none.toml")}
    assert_one_line(call("cluster", "sync", empty.file, **env), 2, "add one with trainctl cluster add")
    (empty.there / "data").parent.mkdir()
    (empty.there / "data").write_text("a file where a folder is needed")
    failed = call_json(*words, status=3)["nodes"]["away"]
    assert [one["state"] for one in failed] == ["copied", "failed"]
    assert f"{empty.there}/data" in failed[1]["problem"]
    assert_one_line(call(*words, "--ssh", "away=-oProxyCommand=x"), 2, "must be written as user@host")
