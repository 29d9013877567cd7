"""The demo as a person runs it: it trains, survives its agent's death and its terminal's, and leaves no process.

One node is enough for all of that; test_demo.py has the whole group.
"""

import contextlib
import json
import os
import pty
import re
import shlex
import signal
import socket
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.integration.support.terminals import Terminal, needs_tmux
from tests.tui.support.cli_calls import (
    COMMAND,
    ENVIRONMENT,
    assert_none_left,
    call_json,
    end_all,
    interrupt,
    processes_of,
    started,
    wait_until,
)
from tests.waiting import HANG_SECONDS, slowness

from trainctl.protocol.config import cluster_file
from trainctl.protocol.config.names import agent_address, node_directory, node_name, runtime_directory
from trainctl.protocol.config.run_file import read
from trainctl.tui.demo import folder as demo_folder


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's folder, its model and text made once."""
    return tmp_path_factory.mktemp("demo")


@pytest.fixture
def folder(assets: Path) -> Iterator[Path]:
    yield assets
    try:
        assert_none_left(assets)
    finally:
        end_all(assets)


def sessions(folder: Path) -> list[Path]:
    return sorted(folder.glob("demo-*"))


ALONE = ("--nodes", "1", "--backend", "torch")


def process_of(folder: Path, role: str) -> psutil.Process | None:
    for process in processes_of(folder):
        with contextlib.suppress(psutil.Error):  # it may end meanwhile
            if " ".join(process.cmdline()).startswith(f"trainctl: {role} "):
                return process
    return None


def summary_of(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_the_supervisor_killed_after_the_run_leaves_no_agent(folder: Path) -> None:
    session = demo_folder.Session.create(folder, keep=False)
    command = [COMMAND[0], "-m", "trainctl.tui.demo.supervisor", "--session", session.folder, "--assets", folder]
    with subprocess.Popen(
        [*command, "--node", "here"], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdout is not None
        assert any(json.loads(line)["state"] == "ready" for line in supervisor.stdout)
        assert process_of(folder, "agent") is not None
        supervisor.kill()
    assert_gone_within(folder, 20)


def test_headless_its_agent_and_its_supervisor_killed_the_run_goes_on_and_every_step_is_there(folder: Path) -> None:
    """The full screen is drawn on standard error: where that goes elsewhere, an object is what is printed. An agent
    that stands still is ended by the supervisor, which says so; with its supervisor gone it leaves with the run."""
    here, there = pty.openpty()
    with started("demo", *ALONE, "--steps", "24", "--folder", folder, stdin=there, stdout=there) as process:
        os.close(there)
        assert process.stderr is not None
        assert any("step 4 " in line for line in process.stderr)
        agent, trainer = process_of(folder, "agent"), process_of(folder, "trainer")
        assert agent is not None
        assert trainer is not None
        agent.kill()
        restarted_in = seconds_until_another(folder, agent)
        assert any(re.search(r"step \d+  loss", line) for line in process.stderr)
        stopped = process_of(folder, "agent")
        assert stopped is not None
        suspended_at = time.monotonic()
        stopped.suspend()
        _, stood_at = recorded(sessions(folder)[-1])
        seconds_until_another(folder, stopped)
        replaced_in = time.monotonic() - suspended_at
        shown = (re.search(r"step (\d+)  loss", line) for line in process.stderr)
        assert any(step is not None and int(step[1]) > stood_at + 1 for step in shown), "it conducts the run"
        assert trainer.is_running()
        supervisor = process_of(folder, "demo supervisor")
        assert supervisor is not None
        supervisor.kill()
        assert process_of(folder, "agent") is not None
        _, err = process.communicate(timeout=HANG_SECONDS)
    said = os.read(here, 65536).decode()
    os.close(here)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert restarted_in < 5 * slowness(), "the supervisor starts it at once; the rest is a loaded machine"
    assert 4 < replaced_in < 15 * slowness()
    check_summary(summary_of(said), folder, 24)
    logs = sessions(folder)[-1].glob("*.log")
    assert any("'s agent hasn't responded for 5 s; killing it" in log.read_text() for log in logs)
    assert_gone_within(folder, 20)


def check_summary(found: dict[str, Any], folder: Path, steps: int) -> None:
    """Check what is printed of a run of one torch node that came to its end."""
    assert (found["steps"], found["state"], found["mixed"], found["engine"]) == (steps, "finished", False, "none")
    assert found["last_loss"] < found["first_loss"]
    assert [(node["name"], node["tokens"]) for node in found["nodes"]] == [(node_name(), steps * 24 * 128)]
    directory = Path(found["run_directory"])
    assert directory.is_relative_to(folder)
    assert read(directory / "run.toml").run.steps == steps


def seconds_until_another(folder: Path, agent: psutil.Process) -> float:
    """Return how long it takes until there is an agent in the place of one."""
    began = time.monotonic()
    wait_until(
        lambda: (again := process_of(folder, "agent")) is not None and again.pid != agent.pid,
        "the agent to be started again", 20,
    )  # fmt: skip
    return time.monotonic() - began


@pytest.mark.tier("test")
def test_ctrl_c_stops_a_headless_demo(folder: Path) -> None:
    with started("demo", *ALONE, "--headless", "--steps", "5000", "--folder", folder) as process:
        assert process.stderr is not None
        assert next(line for line in iter(process.stderr.readline, "") if "step 1 " in line)
        out, err = interrupt(process)
    assert process.returncode == 130
    assert out == ""
    assert err.count("stopping the demo") == 1
    assert "Traceback" not in err
    assert_gone_within(folder, 20)


def test_ctrl_c_while_it_starts_leaves_nothing(folder: Path) -> None:
    with started("demo", "--headless", "--steps", "5000", "--folder", folder) as process:
        assert process.stderr is not None
        assert "making" in process.stderr.readline()
        out, _ = interrupt(process)
    assert (process.returncode, out) == (130, "")
    wait_until(lambda: not processes_of(folder), "all to end", 60)


@pytest.mark.tier("test")
def test_its_terminal_closed_it_trains_to_the_end_and_then_leaves(folder: Path) -> None:
    """A hang-up kills the program at the terminal; supervisor, agent and trainer are of another session."""
    before = set(sessions(folder))
    here, there = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "demo", *ALONE, "--headless", "--steps", "6", "--folder", str(folder)],
        env=ENVIRONMENT, stdin=there, stdout=there, stderr=there, start_new_session=True,
    )  # fmt: skip
    os.close(there)
    said = b""
    while b"step 2 " not in said:
        said += os.read(here, 4096)
    process.send_signal(signal.SIGHUP)  # first: a line that can be written no more would end it as well
    os.close(here)
    assert process.wait(HANG_SECONDS) == -signal.SIGHUP
    assert process_of(folder, "trainer") is not None
    assert_gone_within(folder, 60)
    (session,) = set(sessions(folder)) - before
    assert recorded(session) == (6, 6)


def recorded(session: Path) -> tuple[int, int]:
    """Return how many steps the record of the session's run has, and the last of them."""
    (record,) = session.rglob("record.db")
    with contextlib.closing(sqlite3.connect(record)) as connection:
        count, last = connection.execute("SELECT COUNT(*), MAX(step) FROM steps").fetchone()
    return count, last


def assert_gone_within(folder: Path, seconds: float) -> None:
    wait_until(lambda: not processes_of(folder), "the demo to end by itself", seconds)


def test_a_socket_that_is_taken_ends_the_start_with_the_agent_s_own_words(folder: Path) -> None:
    session = demo_folder.Session.create(folder, keep=False)
    address = agent_address(node_directory("here", session.state))
    path = runtime_directory(node_directory("here", session.state)) / "agent.sock"
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(str(path))
        taken.listen()
        command = [COMMAND[0], "-m", "trainctl.tui.demo.supervisor", "--session", session.folder, "--assets", folder]
        with subprocess.Popen(
            [*command, "--node", "here"],
            env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as supervisor:  # fmt: skip
            assert supervisor.stdout is not None
            said = [json.loads(line) for line in supervisor.stdout]
            assert supervisor.wait(HANG_SECONDS) == 1
    assert said[-1]["state"] == "failed"
    assert address in said[-1]["error"]


@needs_tmux
def test_on_the_screen_it_is_steered_and_goes_on_when_the_screen_is_left(folder: Path, tmp_path: Path) -> None:
    """The program from end to end in a real terminal: screens, a dialog, the `:` line, the palette, and leaving it."""
    words = ["demo", *ALONE, "--steps", "100000", "--folder", str(folder)]
    before = set(sessions(folder))
    terminal = Terminal(tmp_path, 120, 40, shlex.join([*COMMAND, *words]))
    try:
        terminal.wait_for(r"RUNNING")
        terminal.keys("b")
        terminal.wait_for(r"resize micro-batch")
        terminal.keys("BSpace", "4")
        terminal.wait_for(r"8×3 → 4×6")
        terminal.keys("Enter")
        terminal.wait_for(r"micro-batch: vm 8→4 @[\d,]+")  # the dialog has closed, and the Overview shows it
        terminal.keys("4")
        terminal.wait_for(r"resize-batch .*vm 8→4 .*applied")
        (session,) = set(sessions(folder)) - before
        here = ("--connect", next(iter(cluster_file.read(session / "cluster.toml").nodes.values())).address)
        assert call_json("send", "pause", *here)["state"] == "applied"  # its steps take the CPU from what is to be seen
        terminal.keys(":")
        terminal.wait_for(r"a verb as on the command line")
        terminal.keys("-l", "note text=hello")
        terminal.wait_for(r"recorded in the run's events at step [\d,]+; curve unchanged")
        terminal.keys("Enter")
        terminal.wait_for(r"note +[\d,]+ +hello")
        terminal.wait_gone(r"note text=hello")  # keys are the line's until its command is applied
        terminal.keys("C-p")
        terminal.wait_for(r"resize-batch(.|\n)*overview|Search")
        terminal.keys("-l", "theme contrast")
        terminal.wait_for(r"change how the screen looks")
        terminal.keys("Enter")
        terminal.wait_gone(r"change how the screen looks")
        terminal.keys("1")
        terminal.wait_for(r"busy seconds|4×6")
        assert call_json("send", "resume", *here)["state"] == "applied"
        terminal.wait_for(r"RUNNING")
        terminal.keys("q")
        assert terminal.exit_status() == "status=0"
        tail = terminal.wait_for(r"stop it with: trainctl send stop")
        assert terminal.is_clean()
    finally:
        terminal.close()
    address = re.findall(r"trainctl attach --connect (ipc://[^\s;]+)", tail)[-1]
    assert call_json("status", "--connect", address)["run"]["state"] == "running"
    assert call_json("send", "stop", "checkpoint=false", "--connect", address)["state"] == "applied"
    assert_gone_within(folder, 30)
