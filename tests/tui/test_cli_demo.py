"""The demo as a person runs it: it trains, survives its agent's death and its terminal's, and leaves no process."""

import contextlib
import json
import os
import pty
import re
import signal
import socket
import sqlite3
import subprocess
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from trainctl.protocol import examples
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.runfile import NAME_PATTERN, read
from trainctl.tui import demo, demo_folder, demo_supervisor

from .cli_calls import (
    COMMAND,
    ENVIRONMENT,
    assert_none_left,
    call_json,
    call_process,
    end_all,
    interrupt,
    processes_of,
    started,
    wait_until,
)


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


def process_of(folder: Path, module: str) -> psutil.Process | None:
    found = [process for process in processes_of(folder) if module in process.cmdline()]
    return found[0] if found else None


def summary_of(out: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_headless_it_trains_and_says_how_it_went(folder: Path) -> None:
    done = call_process("demo", "--headless", "--steps", "6", "--backend", "torch", "--folder", folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = summary_of(done.stdout)
    assert found["steps"] == 6
    assert 5.0 < found["first_loss"] < 6.0
    assert found["last_loss"] < found["first_loss"]
    assert found["tokens_per_second"] > 0
    assert [(node["name"], node["backend"]) for node in found["nodes"]] == [(demo.node_name(), "torch")]
    assert found["nodes"][0]["tokens"] == 6 * 24 * 128
    assert (found["engine"], found["mixed"], found["state"]) == ("none", False, "finished")
    directory = Path(found["run_directory"])
    assert directory.is_relative_to(folder)
    assert read(directory / "run.toml").run.steps == 6
    assert "step 6  loss" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_agent_killed_the_run_goes_on_and_every_step_is_there(folder: Path) -> None:
    with started("demo", "--json", "--steps", "40", "--backend", "torch", "--folder", folder) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert next(line for line in lines if "step 4 " in line)
        agent = process_of(folder, "trainctl.node_agent.cli")
        trainer = process_of(folder, "trainctl.trainer")
        assert agent is not None
        assert trainer is not None
        agent.kill()
        began = time.monotonic()
        wait_until(
            lambda: (again := process_of(folder, "trainctl.node_agent.cli")) is not None and again.pid != agent.pid,
            "the agent to be started again", 10,
        )  # fmt: skip
        restarted_in = time.monotonic() - began
        assert trainer.is_running()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert restarted_in < 5, "the supervisor starts it at once; the rest is a loaded machine"
    found = summary_of(out)
    assert found["steps"] == 40
    assert found["nodes"][0]["tokens"] == 40 * 24 * 128
    assert "Traceback" not in err


def test_ctrl_c_stops_a_headless_demo(folder: Path) -> None:
    with started("demo", "--headless", "--steps", "5000", "--backend", "torch", "--folder", folder) as process:
        assert process.stderr is not None
        assert next(line for line in iter(process.stderr.readline, "") if "step 1 " in line)
        out, err = interrupt(process)
    assert process.returncode == 130
    assert out == ""
    assert err.count("stopping the demo") == 1
    assert "Traceback" not in err
    assert not processes_of(folder)


def test_ctrl_c_while_it_starts_leaves_nothing(folder: Path) -> None:
    with started("demo", "--headless", "--steps", "5000", "--folder", folder) as process:
        assert process.stderr is not None
        assert "making" in process.stderr.readline()
        out, _ = interrupt(process)
    assert (process.returncode, out) == (130, "")
    wait_until(lambda: not processes_of(folder), "all to end", 60)


def test_its_terminal_closed_it_trains_to_the_end_and_then_leaves(folder: Path) -> None:
    """A hang-up kills the program at the terminal; supervisor, agent and trainer are of another session."""
    before = set(sessions(folder))
    here, there = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "demo", "--headless", "--steps", "30", "--backend", "torch", "--folder", str(folder)],
        env=ENVIRONMENT, stdin=there, stdout=there, stderr=there, start_new_session=True,
    )  # fmt: skip
    os.close(there)
    said = b""
    while b"step 2 " not in said:
        said += os.read(here, 4096)
    os.close(here)
    process.send_signal(signal.SIGHUP)
    assert process.wait(20) == -signal.SIGHUP
    assert process_of(folder, "trainctl.trainer") is not None
    assert_gone_within(folder, 60)
    (session,) = set(sessions(folder)) - before
    (record,) = session.rglob("record.db")
    with sqlite3.connect(record) as connection:
        assert connection.execute("SELECT COUNT(*), MAX(step) FROM steps").fetchone() == (30, 30)
    connection.close()


def assert_gone_within(folder: Path, seconds: float) -> None:
    wait_until(lambda: not processes_of(folder), "the demo to end by itself", seconds)


def test_a_folder_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    done = call_process("demo", "--headless", "--folder", file)
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert str(file) in done.stderr
    assert call_json("demo", "--folder", file, status=done.returncode)["error"]["text"]


def test_a_backend_that_is_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(demo.NEEDED, "mlx", ("no_such_module",))
    with pytest.raises(InvalidInputError, match=r"mlx not installed: pip install 'trainctl\[mlx\]'"):
        demo.check_backend("mlx")
    monkeypatch.setitem(demo.NEEDED, "torch", ("no_such_module",))
    with pytest.raises(InvalidInputError, match=r"trainctl\[torch\]' or pip install 'trainctl\[mlx\]'"):
        demo.check_backend("auto")


def test_a_port_that_is_taken_ends_the_start_with_the_agent_s_own_words(folder: Path) -> None:
    session = demo_folder.Session.create(folder, keep=False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        command = [COMMAND[0], "-m", "trainctl.tui.demo_supervisor", "--session", session.folder, "--assets", folder]
        with subprocess.Popen(
            [*command, "--node", "here", "--listen", address],
            env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        ) as supervisor:  # fmt: skip
            assert supervisor.stdout is not None
            said = [json.loads(line) for line in supervisor.stdout]
            assert supervisor.wait(60) == 1
    assert said[-1]["state"] == "failed"
    assert address in said[-1]["error"]


def test_on_the_screen_it_goes_on_when_the_screen_is_left(folder: Path) -> None:
    here, there = pty.openpty()
    termios.tcsetwinsize(there, (24, 80))
    process = subprocess.Popen(
        [*COMMAND, "demo", "--steps", "100000", "--backend", "torch", "--folder", str(folder)],
        env={**ENVIRONMENT, "TERM": "xterm-256color"}, stdin=there, stdout=there, stderr=there, start_new_session=True,
    )  # fmt: skip
    os.close(there)
    said = bytearray()
    reader = threading.Thread(target=read_all, args=(here, said))
    reader.start()
    try:
        wait_until(lambda: b"RUNNING" in said, "the screen to show the run")
        os.write(here, b"q")
        assert process.wait(60) == 0, said.decode(errors="replace")[-2000:]
    finally:
        process.kill()
        process.wait(20)
        reader.join(20)
        os.close(here)
    tail = said.decode(errors="replace")
    address = re.findall(r"trainctl send stop --connect (tcp://127\.0\.0\.1:\d+)", tail)[-1]
    assert call_json("status", "--connect", address)["run"]["state"] == "running"
    assert call_json("send", "stop", "checkpoint=false", "--connect", address)["state"] == "applied"
    assert_gone_within(folder, 30)


def read_all(descriptor: int, into: bytearray) -> None:
    """What a terminal shows, until its other end is closed (which Linux reports as an error)."""
    with contextlib.suppress(OSError):
        while piece := os.read(descriptor, 65536):
            into += piece


# ---------------------------------------------------------------- the pure parts


def view(state: str) -> Any:
    return msgspec.structs.replace(examples.EXAMPLES["published by an agent"]["run-view"], state=state)


def test_when_a_demo_is_over() -> None:
    watch = demo_supervisor.Watch()
    assert not watch.over(0.0, 60.0)
    watch.see(view("running"))
    watch.note(nobody_watches=True)
    assert not watch.over(0.0, 60.0), "a run outlives its watchers"
    watch.see(view("finished"))
    assert watch.over(0.0, 60.0)


def test_an_ended_run_is_kept_a_while_for_who_still_looks() -> None:
    watch = demo_supervisor.Watch()
    watch.see(view("finished"))
    assert watch.ended_at is not None
    first = watch.ended_at
    watch.see(view("finished"))
    assert watch.ended_at == first
    assert not watch.over(first + 59, 60.0)
    assert watch.over(first + 60, 60.0)
    watch.see(view("running"))
    assert not watch.over(first + 61, 60.0), "taken up again"


@pytest.mark.parametrize("flag", ["asked_to_end", "agent_lost"])
def test_what_ends_a_demo_at_once(flag: str) -> None:
    watch = demo_supervisor.Watch()
    watch.see(view("running"))
    watch.note(**{flag: True})
    assert watch.over(0.0, 60.0)


def test_folders_of_demos_that_are_over_are_dropped(tmp_path: Path) -> None:
    old = [demo_folder.Session(tmp_path / f"demo-{name}") for name in ("over", "kept", "live", "young")]
    for session in old:
        session.folder.mkdir()
        (session.folder / "demo.lock").touch()
        os.utime(session.folder / "demo.lock", (0, 0))
    (tmp_path / "demo-kept" / "keep").touch()
    os.utime(tmp_path / "demo-young" / "demo.lock")
    (tmp_path / "demo-foreign").mkdir()
    (tmp_path / "model").mkdir()
    with old[2].locked():
        os.utime(old[2].folder / "demo.lock", (0, 0))
        demo_folder.drop_ended(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"demo-kept", "demo-live", "demo-young", "demo-foreign", "model"}


def test_this_machine_s_name_is_a_node_s_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Studio.local", "", "--", "Büro 7", "x" * 300, "a-" * 40):
        monkeypatch.setattr(demo.platform, "node", lambda name=name: name)
        assert re.fullmatch(NAME_PATTERN, demo.node_name())
