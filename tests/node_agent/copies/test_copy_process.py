"""The process that copies checkpoints: only complete ones, continued where a try broke off, never removed meanwhile."""

import base64
import email.utils
import getpass
import hmac
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import obstore
import psutil
import pytest
from moto.server import ThreadedMotoServer
from obstore.store import from_url
from tests.conftest import SHARED_PIDS
from tests.integration.support.ports import free_addresses
from tests.integration.support.sshd import LoopbackSshd
from tests.node_agent.support.processes import wait_for
from tests.trainer.support.written_checkpoints import run_directory, written
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.copies import copy_process
from trainctl.node_agent.copies.copy_process import CopyError, CopyLine, copier, copy_newest, to_path, to_rsync
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.checkpoints import COMMAND_VARIABLE, COPYING, step_in_copy
from trainctl.trainer.checkpoints import files

SOON = (0.01, 0.01)


@pytest.fixture
def run(tmp_path):
    """A run directory."""
    return run_directory(tmp_path)


def words_for(run, target):
    return [sys.executable, "-m", "trainctl.node_agent.copies.copy_process", str(run), target]


def started(run, target, **environment):
    return subprocess.Popen(
        words_for(run, target), stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
    )


def held_copy(run, gate):
    """A process whose command waits until a line is written to the gate."""
    return started(run, "command", TRAINCTL_COPY_COMMAND=f"sh -c 'read line < {gate}'")


def test_the_newest_complete_one_is_copied_to_a_path(run, tmp_path):
    written(run, 3)
    torn = written(run, 4)
    (torn / files.WEIGHTS).unlink()
    (tmp_path / "there").mkdir()
    with started(run, str(tmp_path / "there")) as process:
        assert lines_of(process) == [(3, "copying"), (3, "copied")]
    place = tmp_path / "there" / "run-1" / "checkpoints"
    assert [path.name for path in place.iterdir()] == ["step-3"]
    assert (place / "step-3" / "merges.txt").is_file()
    assert files.read(place / "step-3").loop.step == 3
    assert not (run / "checkpoints" / COPYING).exists()
    with pytest.raises(FileNotFoundError, match="is no folder; make it, or mount its disk"):
        to_path(tmp_path / "not-mounted", run / "checkpoints" / "step-3")
    assert not (tmp_path / "not-mounted").exists()


def test_a_signal_ends_the_program_that_copies_too(run, tmp_path):
    """Also if the agent that started it blocks the signal."""
    written(run, 3)
    script = f"echo $$ > {tmp_path}/pid.new; mv {tmp_path}/pid.new {tmp_path}/pid; exec sleep 1000"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        copying = started(run, "command", TRAINCTL_COPY_COMMAND=shlex.join(["sh", "-c", script]))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    wait_for((tmp_path / "pid").exists)
    copying.terminate()
    assert copying.wait(HANG_SECONDS) == 128 + signal.SIGTERM
    wait_for(lambda: not psutil.pid_exists(int((tmp_path / "pid").read_text())))
    copying.stdout.close()


def test_a_copy_that_broke_off_is_continued(run, tmp_path, monkeypatch):
    folder = written(run, 3)
    place = tmp_path / "there" / "run-1" / "checkpoints"
    part = place / ".step-3.part"
    part.mkdir(parents=True)
    (place / ".step-2.part").mkdir()
    shutil.copyfile(folder / "state.json", part / "state.json")
    (part / files.OPTIMIZER).write_bytes((folder / files.OPTIMIZER).read_bytes()[:5000])
    (part / files.WEIGHTS).write_bytes(b"x" * 100)  # of a step that was done again, or damaged
    copied, synced, copyfile, sync = list[str](), list[str](), shutil.copyfile, copy_process.sync
    monkeypatch.setattr(shutil, "copyfile", lambda source, to: (copied.append(source.name), copyfile(source, to)))
    monkeypatch.setattr(copy_process, "sync", lambda path: (synced.append(path.name), sync(path)))
    to_path(tmp_path / "there", folder)
    assert [path.name for path in place.iterdir()] == ["step-3"]
    checkpoints.verify(place / "step-3")
    assert files.WEIGHTS in copied and not {"state.json", files.OPTIMIZER} & {*copied}, "only what is missing is copied"
    assert {files.OPTIMIZER, files.WEIGHTS} <= {*synced}
    to_path(tmp_path / "there", written(run, 3, 2.0))  # the same step with other files
    assert checkpoints.verify(place / "step-3") == checkpoints.read_manifest(folder)


@pytest.fixture
def rsync_server(tmp_path):
    """The target of a server on loopback, and its folder."""
    place, config = tmp_path / "served", tmp_path / "rsyncd.conf"
    place.mkdir()
    identity = f"uid = {os.getuid()}\ngid = {os.getgid()}\n" if os.getuid() == 0 else ""
    config.write_text(f"{identity}use chroot = no\n[runs]\npath = {place}\nread only = no\n", "utf-8")
    for _ in range(5):  # another process may take the port before the server does
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        words = ["rsync", "--daemon", "--no-detach", f"--config={config}", f"--port={port}", "--address=127.0.0.1"]
        server = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        wait_for(lambda server=server, port=port: server.poll() is not None or answers(port))
        if server.poll() is None:
            break
    yield f"rsync://127.0.0.1:{port}/runs", place
    server.terminate()
    server.wait()


def answers(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.needs("rsync")
def test_rsync_gets_the_same_folders(run, rsync_server, monkeypatch):
    folder = written(run, 3)
    target, place = rsync_server
    to_rsync(target, folder)
    copied = place / "run-1" / "checkpoints" / "step-3"
    checkpoints.verify(copied)
    run_it = copy_process._run

    def done_again(command, cwd=None):
        run_it(command, cwd)
        written(run, 3, value=4)

    with monkeypatch.context() as patch:  # the step is done again while it is copied
        patch.setattr(copy_process, "_run", done_again)
        with pytest.raises(CopyError, match="replaced, while it was copied"):
            to_rsync(target, folder)
    with pytest.raises(InvalidInputError, match=r"manifest\.json is missing"):
        checkpoints.verify(copied)
    to_rsync(target, folder)
    assert checkpoints.verify(copied) == checkpoints.read_manifest(folder)
    with pytest.raises(CopyError, match="rsync exited with"):
        to_rsync(f"{target}-of-another", folder)


class Backup:
    """A machine behind sshd that `ssh` of the PATH finds by the name `there`, with nothing in its home."""

    def __init__(self, folder, sshd, monkeypatch):
        self.home, self.target = sshd.home, f"{getpass.getuser()}@there:kept"
        self.asked, self._calls, self._keys = folder / "asked", folder / "calls", sshd.config.parent
        self.config = folder / "ssh_config"
        self.config.write_text(sshd.config.read_text().replace(f"{self._keys}/", f"{folder}/"))
        for name in ("user_key", "user_key.pub", "known_hosts"):
            shutil.copy(self._keys / name, folder / name)
        self.key, self.known_hosts = folder / "user_key", folder / "known_hosts"
        self.admit(self._keys / "user_key.pub")
        shutil.rmtree(self.home / "kept", ignore_errors=True)
        (folder / "bin").mkdir()
        program = shutil.which("ssh")
        self._script(folder / "bin" / "ssh", f'echo "$*" >> {self._calls}; exec {program} -F {self.config} "$@"')
        self._script(folder / "bin" / "ask", f'echo "$*" >> {self.asked}; exit 1')
        monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
        monkeypatch.setenv("SSH_ASKPASS", str(folder / "bin" / "ask"))
        monkeypatch.setenv("SSH_ASKPASS_REQUIRE", "force")  # whatever ssh would ask, also without a terminal
        monkeypatch.delenv("RSYNC_RSH", raising=False)

    @staticmethod
    def _script(path, text):
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def admit(self, public_key):
        """Let only who has this key log in, in the home that is the other machine's."""
        options = f'command="cd {self.home} && eval \\"$SSH_ORIGINAL_COMMAND\\""'
        line = f"{options} {public_key.read_text()}" if public_key is not None else ""
        (self._keys / "authorized_keys").write_text(line)

    @property
    def calls(self):
        return self._calls.read_text().splitlines() if self._calls.exists() else []

    def copy_of(self, step):
        return self.home / "kept" / "run-1" / "checkpoints" / f"step-{step}"


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with LoopbackSshd(tmp_path_factory.mktemp("sshd")) as server:
        SHARED_PIDS.add(server.pid)
        yield server


@pytest.fixture
def backup(sshd, tmp_path, monkeypatch):
    (tmp_path / "ssh").mkdir()
    return Backup(tmp_path / "ssh", sshd, monkeypatch)


@pytest.mark.needs("sshd", "rsync")
def test_by_ssh_a_copy_arrives_whole_and_a_refused_key_is_a_failure_with_the_reason(run, backup):
    """The try that is refused is repeated until there is a newer checkpoint, which is copied once the key is known."""
    backup.admit(None)
    written(run, 3)
    with started(run, backup.target) as process:
        wait_for(lambda: backup.calls)
        written(run, 4)
        lines = [CopyLine(**json.loads(process.stdout.readline())) for _ in range(3)]
        backup.admit(backup.key.with_suffix(".pub"))
        lines += [CopyLine(**json.loads(text)) for text in process.stdout]
    outcomes = [(3, "copying"), (3, "failed"), (4, "copying"), (4, "copied")]
    assert [(line.step, line.state) for line in lines] == outcomes
    assert lines[1].problem.startswith("rsync exited with ")
    assert "@127.0.0.1: Permission denied (publickey" in lines[1].problem
    assert checkpoints.verify(backup.copy_of(4)) == checkpoints.read_manifest(run / "checkpoints" / "step-4")
    assert not backup.copy_of(3).exists()
    assert not backup.asked.exists()


@pytest.mark.needs("sshd", "rsync")
@pytest.mark.parametrize("what", ["a key with a passphrase", "a host that is not known", "another host key"])
def test_by_ssh_nothing_is_asked_and_the_reason_is_ssh_s_own(run, backup, what):
    folder, why = written(run, 3), "Host key verification failed"
    if what == "a key with a passphrase":
        words = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a passphrase", "-f", str(backup.key)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        why = "Permission denied (publickey"
    elif what == "another host key":
        (host, kind, _), other = backup.known_hosts.read_text().split(), backup.key.with_suffix(".pub").read_text()
        backup.known_hosts.write_text(f"{host} {kind} {other.split()[1]}\n")
    else:
        backup.known_hosts.write_text("")
        backup.config.write_text(f"Host *\n  StrictHostKeyChecking ask\n{backup.config.read_text()}")
    with pytest.raises(CopyError, match=r"^rsync exited with \d+: .") as failed:
        to_rsync(backup.target, folder)
    assert str(failed.value).partition(": ")[2].startswith((why, f"{getpass.getuser()}@127.0.0.1: {why}"))
    assert not backup.asked.exists(), backup.asked.read_text()
    assert not (backup.home / "kept").exists()


def test_a_command_gets_the_folder_and_an_error_is_tried_again_until_the_next_checkpoint(run, tmp_path, monkeypatch):
    monkeypatch.setattr(copy_process, "BACKOFF_SECONDS", SOON)
    written(run, 3)
    tries, lines = tmp_path / "tries", list[CopyLine]()
    script = (
        f'echo "$2" >> {tries}; test -e {tmp_path}/open || {{ echo no bucket >&2; exit 4; }}; cp -r "$1" {tmp_path}/'
    )
    monkeypatch.setenv(COMMAND_VARIABLE, shlex.join(["sh", "-c", script, "copy", "{folder}", "{run}/{step}"]))
    assert not copy_newest(run, copier("command"), lines.append)
    assert tries.read_text().split() == ["run-1/3"] * 3
    assert (lines[-1].state, lines[-1].problem) == ("failed", "sh exited with 4: no bucket")
    (tmp_path / "open").touch()
    written(run, 4)
    assert copy_newest(run, copier("command"), lines.append)
    assert checkpoints.verify(tmp_path / "step-4").step == 4
    with pytest.raises(CopyError, match="no-such-program"):
        copy_process.by_command(["no-such-program"], run)


@pytest.fixture
def bucket(monkeypatch):
    """The URL of a bucket of an S3 server on loopback."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/runs", method="PUT")).close()
    for name, value in {"ENDPOINT_URL": endpoint, "REGION": "us-east-1", "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    yield "s3://runs/kept"
    server.stop()


@pytest.fixture
def container(tmp_path, monkeypatch):
    """The URL of a container of Azurite's, which stands for Azure on loopback."""
    (address,) = free_addresses(1)
    port, account = address.rpartition(":")[2], "devstoreaccount1"
    key = base64.b64encode(b"of this test alone").decode()
    words = ["azurite-blob", "--silent", "--skipApiVersionCheck", "--location", str(tmp_path / "azurite")]
    server = subprocess.Popen(
        [*words, "--blobPort", port],
        stdout=subprocess.PIPE,
        env={**os.environ, "AZURITE_ACCOUNTS": f"{account}:{key}"},
    )
    while b"successfully listens" not in server.stdout.readline():
        assert server.poll() is None
    endpoint = f"http://127.0.0.1:{port}/{account}"
    for name, value in {
        "STORAGE_ACCOUNT_NAME": account, "STORAGE_ACCOUNT_KEY": key, "ENDPOINT": endpoint, "ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AZURE_{name}", value)
    make_container(endpoint, account, key)
    yield "az://runs/kept"
    server.terminate()
    server.communicate(timeout=HANG_SECONDS)


def make_container(endpoint, account, key):
    """Make the container `runs`, with a request signed by the account's key, as Azure wants it."""
    at, version = email.utils.formatdate(usegmt=True), "2021-08-06"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{at}\nx-ms-version:{version}\n/{account}/{account}/runs\nrestype:container"
    digest = hmac.new(base64.b64decode(key), signed.encode(), "sha256").digest()
    headers = {"x-ms-date": at, "x-ms-version": version}
    headers["Authorization"] = f"SharedKey {account}:{base64.b64encode(digest).decode()}"
    request = urllib.request.Request(f"{endpoint}/runs?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request).close()


@pytest.fixture(params=["bucket", pytest.param("container", marks=pytest.mark.needs("azurite"))])
def store_url(request):
    return request.getfixturevalue(request.param)


def test_a_store_gets_what_it_lacks_and_the_manifest_last(run, store_url, tmp_path, monkeypatch):
    folder = written(run, 3)
    store, put, puts = from_url(f"{store_url}/run-1/checkpoints/step-3"), obstore.put, list[str]()
    monkeypatch.setattr(obstore, "put", lambda *words, **fields: (puts.append(words[1]), put(*words, **fields)))

    def fetched(name):
        """A checkpoint of the store's, as someone who resumes from it has it."""
        for item in obstore.list(store).collect():
            to = tmp_path / name / item["path"].rpartition("/")[2]
            to.parent.mkdir(exist_ok=True)
            to.write_bytes(obstore.get(store, item["path"].rpartition("/")[2]).bytes())
        return tmp_path / name

    copier(store_url)(folder)
    assert puts[-1] == "run-1/checkpoints/step-3/manifest.json"
    assert files.read(fetched("first")).loop.step == 3
    puts.clear()
    obstore.delete(store, ["manifest.json", files.WEIGHTS])  # a try that broke off
    copier(store_url)(folder)
    assert [name.rpartition("/")[2] for name in puts] == [files.WEIGHTS, "manifest.json"]
    copier(store_url)(written(run, 3, 2.0))  # the same step with other files
    assert checkpoints.verify(fetched("again")) == checkpoints.read_manifest(folder)


def test_a_store_that_refuses_is_a_failure_with_the_reason(run, bucket, monkeypatch):
    monkeypatch.setattr(copy_process, "BACKOFF_SECONDS", ())
    written(run, 3)
    lines = list[CopyLine]()
    assert not copy_newest(run, copier("s3://another-bucket"), lines.append)
    assert lines[-1].state == "failed" and "another-bucket" in lines[-1].problem


@pytest.fixture
def gate(tmp_path):
    """A FIFO that a command for copies reads a line of before it ends."""
    made = tmp_path / "gate"
    os.mkfifo(made)
    return made


def waits_for_its_turn(pid):
    return any(Path(file.path).name == copy_process.LOCK for file in psutil.Process(pid).open_files())


def lines_of(process):
    """Return what it has said of which step, once it has ended well."""
    out, _ = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 0
    return [(line["step"], line["state"]) for line in map(json.loads, out.splitlines())]


def test_what_is_being_copied_stays_and_another_process_waits_for_its_turn(run, tmp_path, gate):
    for step in (1, 2, 3):
        written(run, step)
    (tmp_path / "there").mkdir()
    with held_copy(run, gate) as held:
        wait_for(lambda: step_in_copy(run / "checkpoints"))
        for step in (4, 5):
            written(run, step)
        files.prune(run / "checkpoints", 2, [])
        assert [path.name for path in checkpoints.listed(run / "checkpoints")] == ["step-5", "step-4", "step-3"]
        with started(run, str(tmp_path / "there")) as other:
            wait_for(lambda: waits_for_its_turn(other.pid))
            gate.write_text("continue\n")
            wait_for(lambda: step_in_copy(run / "checkpoints") == 5)
            assert not [*(tmp_path / "there").iterdir()], "the other one has not begun"
            gate.write_text("continue\n")
            assert lines_of(held) == [(3, "copying"), (3, "copied"), (5, "copying"), (5, "copied")]
            assert lines_of(other) == [(5, "copying"), (5, "copied")], "its agent hears how the copy went"
    files.prune(run / "checkpoints", 2, [])
    assert [path.name for path in checkpoints.listed(run / "checkpoints")] == ["step-5", "step-4"]


def test_a_process_whose_agent_ended_while_it_waited_copies_nothing(run, tmp_path, gate):
    """Else one would be left of each life of an agent, and copy the same checkpoint again."""
    written(run, 3)
    there = tmp_path / "there"
    there.mkdir()
    words = words_for(run, str(there))
    with held_copy(run, gate) as held:
        wait_for(lambda: step_in_copy(run / "checkpoints"))
        shell = ["sh", "-c", '"$@" > /dev/null & echo $!; read line', "sh", *words]
        with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as agent:
            other = psutil.Process(int(agent.stdout.readline()))
            wait_for(lambda: waits_for_its_turn(other.pid))
            agent.kill()
        gate.write_text("continue\n")
        assert lines_of(held) == [(3, "copying"), (3, "copied")]
    other.wait(HANG_SECONDS)
    assert not [*there.iterdir()]
