"""An agent's program that can't start: wrong addresses and names, taken ports and folders.

tests/node_agent/clients/test_bad_input.py has what must not get into one that runs.
"""

import contextlib
import shlex
import socket
import subprocess
import sys

import pytest
from tests.tui.support.cli_calls import assert_one_line, call
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.errors import UnreachableError
from trainctl.protocol.messages import RunsRequest, SnapshotRequest


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
    install = [sys.executable, "-m", "trainctl.node_agent.cli", "install", "--dry-run", *words]
    for done in (
        agent_command(*words, "--state", str(tmp_path / "s")),
        subprocess.run(install, capture_output=True, text=True, timeout=HANG_SECONDS),
    ):
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"chmod go-w {file}" in done.stderr
    assert_one_line(call("ls", "--cluster", str(file)), 5, f"no agent at ipc://{tmp_path}/x.sock")


def test_a_bad_node_name_is_refused(tmp_path):
    done = agent_command("--name", "../x", "--state", str(tmp_path / "s"))
    assert done.returncode == 2
    assert "../x" in done.stderr


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
