"""An agent's program: what it can't start with, and how its node leaves with a checkpoint when it must."""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.asking import run_of
from tests.cluster.run_files import FOREVER, NODE, on_mlx
from tests.cluster.waits import wait_for_end, wait_for_step
from tests.integration.conftest import AgentProcess
from tests.tui.support.cli_calls import assert_one_line, call
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import UnreachableError
from trainctl.protocol.messages import RunsRequest, SnapshotRequest
from trainctl.protocol.record.checkpoints import COMMAND_VARIABLE, verify


def agent_command(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "trainctl.node_agent.cli", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.mark.parametrize(
    ("listen", "words"),
    [
        ("tcp://0.0.0.0:7999", "TCP needs keys"),
        ("tcp://192.0.2.1:7999", "TCP needs keys"),
        ("tcp://127.0.0.1:7999", "ipc:///PATH, as agents do without an address, which needs none; or admit all users"),
        ("ipc://@name", "ipc:///path"),
        ("nonsense", "tcp://host:port"),
        ("tcp://127.0.0.1", "tcp://host:port"),
    ],
)
def test_an_address_that_may_not_be_listened_on_is_one_line_and_exit_2(tmp_path, listen, words):
    done = agent_command("--name", "x", "--state", str(tmp_path / "s"), "--listen", listen)
    assert done.returncode == 2
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_taken_port_and_a_taken_folder_are_named(agent, tmp_path):
    port = agent_command("--name", "x", "--state", str(tmp_path / "s"), "--no-keys", "--listen", agent.address)
    assert (port.returncode, port.stderr.count("\n")) == (2, 1)
    assert agent.address in port.stderr
    folder = agent_command("--name", "box", "--state", str(agent.state))
    assert (folder.returncode, folder.stderr.count("\n")) == (2, 1)
    assert str(agent.directory) in folder.stderr


def test_an_agent_runs_no_hooks_that_others_could_write(tmp_path):
    """Nor is a service of one installed. Clients, which run none, read the file."""
    file = tmp_path / "cluster.toml"
    file.write_text(f"[nodes.x]\naddress = 'ipc://{tmp_path}/x.sock'\n[alerts]\ncommand = ['true']\n")
    file.chmod(0o664)
    words = ["--name", "x", "--cluster", str(file)]
    install = [sys.executable, "-m", "trainctl.node_agent.cli", "install", "--dry-run", "--manager", "systemd", *words]
    for done in (
        agent_command(*words, "--state", str(tmp_path / "s")),
        subprocess.run(install, capture_output=True, text=True, timeout=HANG_SECONDS),
    ):
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"chmod go-w {file}" in done.stderr
    assert_one_line(call("ls", "--cluster", str(file)), 5, f"no agent at ipc://{tmp_path}/x.sock")


@pytest.mark.parametrize("streams", [">/dev/full 2>/dev/full", ">&- 2>&- <&-"])
def test_an_agent_runs_without_its_streams(tmp_path, streams):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    command = [
        sys.executable,
        "-m",
        "trainctl.node_agent.cli",
        "run",
        "--no-keys",
        "--state",
        str(tmp_path),
        "--listen",
        listen,
    ]
    process = subprocess.Popen(["bash", "-c", f"exec {shlex.join(command)} {streams}"])
    try:
        with BlockingClient(listen) as client:
            until(lambda: reached(client), what="the agent")
            assert client.ask(RunsRequest).runs == ()
    finally:
        process.terminate()
        assert process.wait(HANG_SECONDS) == 0


def reached(client):
    with contextlib.suppress(UnreachableError):
        return client.ask(SnapshotRequest, 0)
    return None


@pytest.fixture
def alone(tmp_path) -> Iterator[AgentProcess]:
    """An agent that a test starts with options of its own; its run must have ended when the test does."""
    process = AgentProcess(tmp_path / "state")
    yield process
    process.clean_up()


def start(agent: AgentProcess, *options: str) -> None:
    agent.options = options
    agent.start()


def begin(agent: AgentProcess, config: dict) -> str:
    with agent.client() as client:
        started = client.send("start-run", {"config": config})
        assert started.state == "applied", started.reason
        wait_for_step(client, 3)
    assert started.run is not None
    return started.run


def exit_status(agent: AgentProcess) -> tuple[int, str]:
    assert agent.process is not None and agent.process.stderr is not None
    status, said = agent.process.wait(HANG_SECONDS), agent.process.stderr.read()
    agent.kill()
    return status, said


def newest_checkpoint(agent: AgentProcess, run: str) -> int:
    return max(int(path.name.removeprefix("step-")) for path in agent.run_paths(run).checkpoints.glob("step-*"))


@pytest.mark.timeout(600)
def test_what_cannot_leave_in_time_is_left_running_and_a_second_sigterm_waits_for_nothing(alone, run_config):
    start(alone, "--drain-on-term", "--grace", "3600")
    run = begin(alone, run_config(run__steps=FOREVER, nodes=on_mlx(NODE)))
    (trainer,) = alone.trainer_pids()
    os.kill(trainer, signal.SIGSTOP)
    alone.process.send_signal(signal.SIGTERM)
    with alone.client() as client:
        until(lambda: run_of(client).state == "stopping", what="the stop")
    alone.process.send_signal(signal.SIGTERM)
    assert exit_status(alone)[0] == 0
    assert alone.trainer_pids() == [trainer]

    start(alone, "--drain-on-term", "--grace", "1")
    alone.process.send_signal(signal.SIGTERM)
    status, said = exit_status(alone)
    assert status == 1 and "had not left after 1 s; its trainer was left running" in said
    assert alone.trainer_pids() == [trainer]

    start(alone, "--drain-on-term", "--grace", "3600")
    os.kill(trainer, signal.SIGCONT)
    with alone.client() as client:
        assert wait_for_end(client).state == "stopped"
        last = run_of(client).step
    assert newest_checkpoint(alone, run) == last
    alone.process.send_signal(signal.SIGTERM)
    assert exit_status(alone)[0] == 0


@pytest.mark.timeout(600)
def test_an_agent_waits_for_the_copy_of_the_last_checkpoint(alone, run_config, tmp_path: Path, monkeypatch):
    gate, there = tmp_path / "gate", tmp_path / "there"
    os.mkfifo(gate)
    command = ("sh", "-c", f'read line < {gate} && cp -r "$1" {there}', "copy", "{folder}")
    monkeypatch.setenv(COMMAND_VARIABLE, shlex.join(command))
    start(alone, "--drain-on-term", "--grace", "3600")
    run = begin(alone, run_config(run__steps=FOREVER, nodes=on_mlx(NODE), checkpoint={"copy_to": "command"}))
    alone.process.send_signal(signal.SIGTERM)
    until(lambda: not alone.trainer_pids(), what="the end of the trainer")
    with pytest.raises(subprocess.TimeoutExpired):
        alone.process.wait(2)
    gate.write_text("continue\n")
    assert exit_status(alone)[0] == 0
    assert verify(there).step == newest_checkpoint(alone, run)


@pytest.mark.timeout(600)
def test_a_command_that_does_not_exist_is_refused(tmp_path: Path):
    agent = AgentProcess(tmp_path / "state")
    agent.options = ("--spot-notice-command", "no-such-program-here")
    with pytest.raises(AssertionError, match="--spot-notice-command: program 'no-such-program-here' not found"):
        agent.start()
    agent.kill()
